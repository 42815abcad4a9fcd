//! The guest end of the VM's channel: a virtio-serial port.
//!
//! The host end is a socket held by `vm.rs` of `lab`.

use crate::Failure;
use lab_guest::frame::{Frame, Kind};
use lab_guest::order::PORT;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The port, opened for both directions.
pub(crate) struct Channel {
    read: File,
    sender: Sender,
}

impl Channel {
    /// Waits for the port to appear and opens it.
    pub(crate) fn open(patience: Duration) -> Result<Self, Failure> {
        let start = Instant::now();
        let path = loop {
            if let Some(path) = find_port() {
                break path;
            }
            if start.elapsed() > patience {
                return Err(format!("no virtio-serial port {PORT}").into());
            }
            thread::sleep(Duration::from_millis(5));
        };
        let read = OpenOptions::new().read(true).write(true).open(&path)?;
        let write = read.try_clone()?;
        Ok(Self { read, sender: Sender { port: Arc::new(Mutex::new(write)) } })
    }

    /// The next frame from the host; an error when the host is gone.
    pub(crate) fn receive(&mut self) -> io::Result<Frame> {
        Frame::read_from(&mut self.read)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// A handle for sending; clones share the port.
    pub(crate) fn sender(&self) -> Sender {
        self.sender.clone()
    }
}

/// Sends frames to the host from any thread.
#[derive(Clone)]
pub(crate) struct Sender {
    port: Arc<Mutex<File>>,
}

impl Sender {
    /// Sends one frame.
    pub(crate) fn send(&self, kind: Kind, process: u32, payload: Vec<u8>) -> io::Result<()> {
        let mut port = self.port.lock().unwrap_or_else(PoisonError::into_inner);
        Frame { kind, process, payload }.write_to(&mut *port)
    }
}

fn find_port() -> Option<PathBuf> {
    fs::read_dir("/sys/class/virtio-ports").ok()?.flatten().find_map(|entry| {
        let name = fs::read_to_string(entry.path().join("name")).ok()?;
        let device = Path::new("/dev").join(entry.file_name());
        (name.trim() == PORT && device.exists()).then_some(device)
    })
}
