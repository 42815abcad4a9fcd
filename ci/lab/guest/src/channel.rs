//! The guest end of the VM's channel: a virtio-serial port.
//!
//! The host end is a socket held by `machine/vm.rs` of `lab`.

use crate::Failure;
use lab_guest::frame::{Frame, Kind};
use lab_guest::order::PORT;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The port, opened for both directions.
pub(crate) struct Channel {
    read: Port,
}

impl Channel {
    /// Waits for the port to appear and opens it.
    pub(crate) fn open(patience: Duration) -> Result<Self, Failure> {
        let read = open(patience)?;
        let write = read.try_clone()?;
        let sender = Sender { port: Arc::new(Mutex::new(write)) };
        Ok(Self { read: Port { file: read, sender } })
    }

    /// The next frame from the host.
    pub(crate) fn receive(&mut self) -> io::Result<Frame> {
        Frame::read_from(&mut self.read)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// A handle for sending; clones share the port.
    pub(crate) fn sender(&self) -> Sender {
        self.read.sender.clone()
    }
}

/// The port as it is read. Its end is none: a host that is gone takes the guest with it. When the machine has slept,
/// the driver does not hear any more that the host is there, and neither reads nor writes until it is bound anew.
struct Port {
    file: File,
    sender: Sender,
}

impl Port {
    /// How long the driver may take to hear of the host by itself.
    const DEAF: Duration = Duration::from_millis(300);

    /// Binds the driver anew, and opens the port that it makes.
    fn reopen(&mut self) -> io::Result<()> {
        const DRIVER: &str = "/sys/bus/virtio/drivers/virtio_console";
        let names =
            fs::read_dir(DRIVER)?.flatten().map(|entry| entry.file_name().into_encoded_bytes());
        let devices: Vec<_> = names.filter(|name| name.starts_with(b"virtio")).collect();
        for device in &devices {
            fs::write(Path::new(DRIVER).join("unbind"), device)?;
            fs::write(Path::new(DRIVER).join("bind"), device)?;
        }
        self.file = open(Duration::from_secs(5))
            .map_err(|failure| io::Error::other(failure.to_string()))?;
        self.sender.replace(self.file.try_clone()?);
        Ok(())
    }
}

impl Read for Port {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        /// How often to look whether the driver hears the host, which nothing else says.
        const PAUSE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
        let mut deaf_since = None;
        loop {
            let mut waits = [PollFd::new(&self.file, PollFlags::IN)];
            poll(&mut waits, Some(&PAUSE))?;
            let [found] = waits.map(|wait| wait.revents());
            if found.contains(PollFlags::IN) {
                match self.file.read(buffer)? {
                    0 if !buffer.is_empty() => {}
                    length => return Ok(length),
                }
            }
            if !found.contains(PollFlags::HUP) {
                deaf_since = None;
                continue;
            }
            thread::sleep(Duration::from_millis(20));
            if deaf_since.get_or_insert_with(Instant::now).elapsed() > Self::DEAF {
                self.reopen()?;
                deaf_since = None;
            }
        }
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
        let frame = Frame { kind, process, payload };
        let mut tries = 100;
        loop {
            let sent = frame.write_to(&mut *self.port());
            match sent {
                // The port is being opened anew.
                Err(error)
                    if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) && tries > 0 =>
                {
                    tries -= 1;
                    thread::sleep(Duration::from_millis(50));
                }
                sent => return sent,
            }
        }
    }

    fn replace(&self, port: File) {
        *self.port() = port;
    }

    fn port(&self) -> MutexGuard<'_, File> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the port to appear and opens it.
fn open(patience: Duration) -> Result<File, Failure> {
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
    Ok(OpenOptions::new().read(true).write(true).open(&path)?)
}

fn find_port() -> Option<PathBuf> {
    fs::read_dir("/sys/class/virtio-ports").ok()?.flatten().find_map(|entry| {
        let name = fs::read_to_string(entry.path().join("name")).ok()?;
        let device = Path::new("/dev").join(entry.file_name());
        (name.trim() == PORT && device.exists()).then_some(device)
    })
}
