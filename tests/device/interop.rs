//! Imports from and by rdma-core, whose handles are bare numbers. The peer is a program of its
//! Python bindings; for VARs and objects of DEVX, which the bindings do not share, a program that calls libmlx5.

use crate::capability::Capability;
use crate::env;
use crate::heir::take_over;
use crate::mlx5::devx::{self, sharing};
use crate::pair::gid;
use crate::partner::{Loop, Wire, pair};
use crate::pattern;
use crate::verdict::{Stop, Verdict, require, supported, trials};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use uverbs::device::DriverId;
use uverbs::mlx5::devx::{DevxObject, Umem};
use uverbs::mlx5::{Uar, UarKind, Var, VarKind, export_sizes};
use uverbs::{Access, Context, Errno, ErrorWith, Foreign, ObjectKind, WcStatus};

trials![
    objects_of_rdma_core_are_imported,
    rdma_core_imports_our_objects,
    vars_of_libmlx5_are_imported,
    libmlx5_imports_our_vars,
    devx_objects_of_libmlx5_are_imported,
    libmlx5_imports_our_devx_objects,
];

const PROGRAM: &str = include_str!("import_peer.py");
const LIBMLX5_PROGRAM: &str = include_str!("libmlx5_peer.py");
const BYTES: usize = 8192;
/// An interpreter loads slowly, above all on an emulated processor.
const PATIENCE: Duration = Duration::from_secs(60);

/// A program that did not start: the test skips if it is not on the path.
pub(crate) fn absent(program: &str, error: &std::io::Error) -> Stop {
    match error.kind() {
        std::io::ErrorKind::NotFound => {
            Stop::Skip(Capability::Peers, format!("no program {program} is on the path"))
        }
        _ => Stop::fail(format!("{program}: {error}")),
    }
}

/// A running program, killed when this is dropped.
struct Peer {
    process: Child,
    wire: Wire,
}

impl Peer {
    fn start(arguments: &[&str]) -> Verdict<Peer> {
        Peer::run(PROGRAM, arguments)
    }

    fn run(program: &str, arguments: &[&str]) -> Verdict<Peer> {
        let native = env::device().driver() == Some(DriverId::MLX5);
        require(native, Capability::Import, "rdma-core imports on mlx5 only")?;
        let wanted = std::env::var("UVERBS_PEERS").is_ok();
        require(wanted, Capability::Peers, "UVERBS_PEERS is not set")?;
        if program == PROGRAM {
            let bindings = Command::new("python3").args(["-c", "import pyverbs"]).output();
            let bindings = bindings.map_err(|error| absent("python3", &error))?;
            require(bindings.status.success(), Capability::Peers, "python3 has no pyverbs")?;
        }
        let (wire, theirs) = pair(PATIENCE)?;
        let process = Command::new("python3")
            .args(["-c", program])
            .args(arguments)
            .stdin(Stdio::from(theirs))
            .spawn()
            .map_err(|error| absent("python3", &error))?;
        Ok(Peer { process, wire })
    }

    /// Sends a line, and returns the peer's answer.
    fn ask(&self, line: &str) -> Verdict<String> {
        self.wire.send(line, None)?;
        Ok(self.hear()?.0)
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
fn objects_of_rdma_core_are_imported() -> Verdict {
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
        let mut own = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(1000)?;
        let mut path = Loop::new(&context, &pd)?;
        let status = path.write(region.sge(..1000)?, own.remote(0)?)?;
        assert_eq!(status, WcStatus::SUCCESS);
        let mut bytes = [0; 1000];
        own.copy_to(0, &mut bytes)?;
        assert!(bytes.iter().all(|byte| *byte == b'A'), "their memory was not read");
        own.copy_from(0, &[b'B'; 1000])?;
        assert_eq!(path.write(own.sge(..)?, region.remote(0)?)?, WcStatus::SUCCESS);
        drop((path, own));
        region.unimport()?;
        pd.unimport()?;
    }
    peer.wire.send("check", None)?;
    let (text, _) = peer.hear()?;
    let (ours, theirs) = text.split_at(1000);
    assert!(ours.bytes().all(|byte| byte == b'B') && theirs.bytes().all(|byte| byte == b'A'));
    peer.wire.send("leave", None)?;
    assert_eq!(peer.hear()?.0, "left");
    Ok(())
}

fn rdma_core_imports_our_objects() -> Verdict {
    let context = env::open()?;
    let (port, mtu) = (env::port().to_string(), env::mtu().0.to_string());
    let peer = Peer::start(&["import", &port, &gid(&context)?.index.to_string(), &mtu])?;
    let pd = context.alloc_pd()?;
    let mut region = pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(BYTES)?;
    region.copy_from(0, &pattern::bytes(4, BYTES / 2))?;
    let text = format!("{} {} {} {}", pd.handle(), region.handle(), region.addr(), BYTES / 2);
    peer.wire.send(&text, Some(&context.share()?))?;
    let (answer, _) = peer.hear()?;
    assert_eq!(answer, format!("{} {} 0", region.lkey().0, region.rkey().0));
    let mut bytes = vec![0; BYTES / 2];
    region.copy_to(BYTES / 2, &mut bytes)?;
    pattern::check(&bytes, 4);
    // Objects that rdma-core only forgot are still there, and those that it made are gone.
    assert_eq!(context.handles(ObjectKind::MR)?, [region.handle()]);
    assert_eq!(context.handles(ObjectKind::QP)?, [0u32; 0]);
    assert_eq!(context.handles(ObjectKind::CQ)?, [0u32; 0]);
    region.destroy()?;
    pd.destroy().map_err(|failed| failed.error.into())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(digits: &str) -> Verdict<Vec<u8>> {
    let pair = |at| digits.get(at..at + 2).ok_or_else(|| Stop::fail("half a byte"));
    (0..digits.len()).step_by(2).map(|at| Ok(u8::from_str_radix(pair(at)?, 16)?)).collect()
}

/// libmlx5 allocates and exports. It forgets a VAR that this process owns, and frees the others.
#[allow(unsafe_code, reason = "such bytes are taken on trust")]
fn vars_of_libmlx5_are_imported() -> Verdict {
    env::shows_stores()?;
    for word in ["free", "unimport"] {
        let peer = Peer::run(LIBMLX5_PROGRAM, &["give", env::device().name()])?;
        let (text, file) = peer.hear()?;
        let (size, blob) = text.split_once(' ').ok_or_else(|| Stop::fail(text.clone()))?;
        assert_eq!(size.parse(), Ok(export_sizes().rdma_core));
        let file = file.ok_or_else(|| Stop::fail("no file came along"))?;
        let context = Context::import(file)?;
        // SAFETY: libmlx5 exported them, and its VAR is not freed before this one is forgotten.
        let imported = unsafe { Var::import_rdma_core(&context, &unhex(blob)?) }?;
        let page = imported.map()?;
        page.ring_u32(0, 0x1122_3344)?;
        assert_eq!(peer.ask("look")?, 0x1122_3344u32.to_string());
        assert_eq!(peer.ask("ring 4026531841")?, "4026531841");
        assert_eq!(page.peek_u32(0)?, 0xf000_0001);
        assert_eq!(context.handles(ObjectKind::MLX5_VAR)?.len(), 1);
        drop(page);
        if word == "free" {
            imported.unimport()?;
        } else {
            // Either side may destroy the VAR, if all others only forget it.
            take_over(imported)?.destroy()?;
        }
        assert_eq!(peer.ask(word)?, "left");
        assert_eq!(context.handles(ObjectKind::MLX5_VAR)?, [0u32; 0], "{word}");
    }
    Ok(())
}

/// libmlx5 imports a VAR of this process, and forgets it or frees it for all.
fn libmlx5_imports_our_vars() -> Verdict {
    env::shows_stores()?;
    let context = env::open()?;
    for word in ["unimport", "free"] {
        let peer = Peer::run(LIBMLX5_PROGRAM, &["take"])?;
        let var = supported(Var::alloc(&context, VarKind::Virtio), Capability::Var)?;
        peer.wire.send(&hex(&var.export_rdma_core()), Some(&context.share()?))?;
        let place = format!("{} {} {}", var.page_id(), var.len(), var.mmap_offset());
        assert_eq!(peer.hear()?.0, place);
        let page = var.map()?;
        assert_eq!(peer.ask("ring 77")?, "77");
        assert_eq!(page.peek_u32(0)?, 77);
        page.ring_u32(0, 78)?;
        assert_eq!(peer.ask("look")?, "78");
        assert_eq!(peer.ask(word)?, "left");
        let left = if word == "free" { 0 } else { 1 };
        assert_eq!(context.handles(ObjectKind::MLX5_VAR)?.len(), left, "{word}");
        // libmlx5 destroyed the VAR, so destroying it again succeeds.
        var.destroy()?;
        assert_eq!((context.handles(ObjectKind::MLX5_VAR)?.len(), context.leaked()), (0, 0));
    }
    Ok(())
}

/// The handles of objects and umems of DEVX that a context has.
fn devx_handles(context: &Context) -> Verdict<[Vec<u32>; 2]> {
    Ok([context.handles(ObjectKind::MLX5_DEVX_OBJ)?, context.handles(ObjectKind::MLX5_DEVX_UMEM)?])
}

/// libmlx5 creates a set of counters and a umem. Here the counters are read and a queue lies in the umem, before either
/// side destroys them.
fn devx_objects_of_libmlx5_are_imported() -> Verdict {
    // An interpreter takes long to start: it opens the device twice.
    let peer = Peer::run(LIBMLX5_PROGRAM, &["devx", env::device().name()])?;
    for word in ["destroy", "unimport"] {
        let create = devx::counters_command();
        peer.wire.send(&format!("create {}", hex(&create)), None)?;
        let (text, file) = peer.hear()?;
        let parts = text.split(' ').map(unhex).collect::<Verdict<Vec<_>>>()?;
        let [output, object, umem] = &parts[..] else { return Err(Stop::fail(text)) };
        let file = file.ok_or_else(|| Stop::fail("no file came along"))?;
        let context = Context::import(file)?;
        let imported = DevxObject::import_rdma_core(&context, object)?;
        let memory = Umem::<Foreign>::import_rdma_core(&context, umem)?;
        // libmlx5 does not know the number of a set of counters.
        assert_eq!(imported.number(), 0);
        let query = devx::counter_query(output[11].into());
        uverbs::mlx5::devx::query(&*imported, &query, &mut [0; 256])?;
        let uar = Uar::alloc(&context, UarKind::NonCached)?;
        let queue = sharing::queue_in(&context, memory.id(), &uar, &[&*memory])?;
        assert_eq!(devx_handles(&context)?.map(|handles| handles.len()), [2, 1]);
        queue.destroy()?;
        if word == "destroy" {
            imported.unimport()?;
            memory.unimport()?;
        } else {
            take_over(imported)?.destroy()?;
            take_over(memory)?.destroy()?;
        }
        assert_eq!(peer.ask(word)?, "left");
        assert_eq!(devx_handles(&context)?, [vec![], vec![]], "{word}");
    }
    Ok(())
}

/// libmlx5 reads our counters, and makes a queue in our umem. It forgets them, or destroys them for all.
fn libmlx5_imports_our_devx_objects() -> Verdict {
    let context = devx::open()?;
    let peer = Peer::run(LIBMLX5_PROGRAM, &["devx"])?;
    for word in ["unimport", "destroy"] {
        let object = devx::counters(&context)?;
        let umem = Umem::builder(&context).page_sizes(4096).allocate(0x2000)?;
        let uar = Uar::alloc(&context, UarKind::NonCached)?;
        peer.wire.send("context", Some(&context.share()?))?;
        let exports = [hex(&object.export_rdma_core()), hex(&umem.export_rdma_core())].join(" ");
        assert_eq!(peer.ask(&format!("take {exports}"))?, umem.id().to_string());
        let query = devx::counter_query(object.number());
        let answer = unhex(&peer.ask(&format!("query {} 256", hex(&query)))?)?;
        assert_eq!((answer.len(), &answer[..8]), (256, &[0; 8][..]));
        let create = sharing::queue_command(&context, umem.id(), &uar)?;
        let answer = unhex(&peer.ask(&format!("queue {}", hex(&create)))?)?;
        assert_eq!(answer[..8], [0; 8]);
        assert_eq!(devx_handles(&context)?.map(|handles| handles.len()), [2, 1]);
        // Firmware keeps the memory while libmlx5 has a queue there.
        let ErrorWith { object: umem, error } = umem.destroy().expect_err("a queue is in it");
        assert_eq!(error.errno(), Errno::BUSY, "{error}");
        assert_eq!(peer.ask(word)?, "left");
        let left = if word == "destroy" { 0 } else { 1 };
        assert_eq!(devx_handles(&context)?.map(|handles| handles.len()), [left; 2], "{word}");
        // What libmlx5 destroyed is gone, so that destroying it again succeeds.
        object.destroy()?;
        umem.destroy()?;
        assert_eq!((devx_handles(&context)?, context.leaked()), ([vec![], vec![]], 0));
    }
    Ok(())
}
