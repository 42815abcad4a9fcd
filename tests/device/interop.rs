//! Imports from and by rdma-core, whose handles are bare numbers: in both directions, with a program
//! of its Python bindings.

use crate::capability::Capability;
use crate::env;
use crate::pair::gid;
use crate::partner::{Loop, Wire, pair};
use crate::pattern;
use crate::verdict::{Stop, Verdict, require, trials};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use uverbs::device::DriverId;
use uverbs::{Context, ObjectKind, WcStatus};

trials![theirs_are_imported, ours_are_imported];

const PROGRAM: &str = include_str!("import_peer.py");
const BYTES: usize = 8192;
/// An interpreter takes its time to load, on an emulated processor above all.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running program, killed when this is dropped.
struct Peer {
    process: Child,
    wire: Wire,
}

impl Peer {
    fn start(arguments: &[&str]) -> Verdict<Peer> {
        let native = env::device().driver() == Some(DriverId::MLX5);
        require(native, Capability::Import, "rdma-core imports on mlx5 only")?;
        let wanted = std::env::var("UVERBS_PEERS").is_ok();
        require(wanted, Capability::Peers, "UVERBS_PEERS is not set")?;
        let (wire, theirs) = pair(PATIENCE)?;
        let process = Command::new("python3")
            .args(["-c", PROGRAM])
            .args(arguments)
            .stdin(Stdio::from(theirs))
            .spawn()
            .map_err(|error| Stop::fail(format!("python3: {error}")))?;
        Ok(Peer { process, wire })
    }

    fn hear(&self) -> Verdict<(String, Option<std::os::fd::OwnedFd>)> {
        self.wire.receive()?.ok_or_else(|| Stop::fail("the program ended"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[allow(unsafe_code, reason = "naming objects by their handles is")]
fn theirs_are_imported() -> Verdict {
    let peer = Peer::start(&["export", env::device().name(), &BYTES.to_string()])?;
    let (text, file) = peer.hear()?;
    let numbers: Vec<u64> = text.split(' ').map(str::parse).collect::<Result<_, _>>()?;
    let [pd_handle, handle, lkey, rkey, addr] = numbers[..] else {
        return Err(Stop::fail(format!("{text:?} is not what was asked for")));
    };
    let file = file.ok_or_else(|| Stop::fail("no file came along"))?;
    {
        let context = Context::import(file)?;
        // SAFETY: the program exported it as the handle of its protection domain.
        let pd = unsafe { context.import_pd_raw(pd_handle as u32) }?;
        // SAFETY: and this as that of its memory region.
        let region = unsafe { pd.import_mr_raw(handle as u32) }?;
        assert_eq!((u64::from(region.lkey().0), u64::from(region.rkey().0)), (lkey, rkey));
        assert_eq!((region.addr(), region.byte_len()), (addr, BYTES));
        let mut own = pd.allocate::<u8>(1000)?;
        let mut path = Loop::new(&context, &pd)?;
        let status = path.write(region.sge(..1000)?, own.remote(0)?)?;
        assert_eq!(status, WcStatus::SUCCESS);
        let mut bytes = [0; 1000];
        own.copy_to(0, &mut bytes)?;
        assert!(bytes.iter().all(|byte| *byte == b'A'), "their memory was not read");
        own.copy_from(0, &[b'B'; 1000])?;
        assert_eq!(path.write(own.sge(..)?, region.remote(0)?)?, WcStatus::SUCCESS);
        drop((path, own));
        region.unimport().map_err(|(_, error)| error)?;
        pd.unimport().map_err(|(_, error)| error)?;
    }
    peer.wire.send("check", None)?;
    let (text, _) = peer.hear()?;
    let (ours, theirs) = text.split_at(1000);
    assert!(ours.bytes().all(|byte| byte == b'B') && theirs.bytes().all(|byte| byte == b'A'));
    peer.wire.send("leave", None)?;
    assert_eq!(peer.hear()?.0, "left");
    Ok(())
}

fn ours_are_imported() -> Verdict {
    let context = env::open()?;
    let peer = Peer::start(&["import", &gid(&context)?.index.to_string()])?;
    let pd = context.alloc_pd()?;
    let mut region = pd.allocate::<u8>(BYTES)?;
    region.copy_from(0, &pattern::bytes(4, BYTES / 2))?;
    let text = format!("{} {} {} {}", pd.handle(), region.handle(), region.addr(), BYTES / 2);
    peer.wire.send(&text, Some(&context.share()?))?;
    let (answer, _) = peer.hear()?;
    assert_eq!(answer, format!("{} {} 0", region.lkey().0, region.rkey().0));
    let mut bytes = vec![0; BYTES / 2];
    region.copy_to(BYTES / 2, &mut bytes)?;
    pattern::check(&bytes, 4);
    // What they forgot is still ours, and what they made is gone.
    assert_eq!(context.handles(ObjectKind::MR)?, [region.handle()]);
    assert_eq!(context.handles(ObjectKind::QP)?, [0u32; 0]);
    assert_eq!(context.handles(ObjectKind::CQ)?, [0u32; 0]);
    region.destroy().map_err(|(_, error)| error)?;
    pd.destroy().map_err(|(_, error)| error.into())
}
