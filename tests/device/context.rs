//! Contexts: opening, the attributes of the device, when the file closes.

use crate::capability::Capability;
use crate::env;
use crate::verdict::{Verdict, supported, trials};
use std::fs::OpenOptions;
use std::os::fd::AsFd;
use uverbs::{Access, Context, Device, Errno, ObjectKind};

trials![
    an_open_context_describes_its_device,
    clones_share_one_file,
    each_context_has_its_own_file,
    objects_keep_the_context_open,
    passed_file_becomes_a_context,
    unfit_files_are_refused_with_the_reason,
];

fn an_open_context_describes_its_device() -> Verdict {
    let context = env::open()?;
    assert_eq!(context.device(), &env::device());
    assert!(context.completion_vectors() >= 1);
    assert_eq!(context.leaked(), 0);
    Ok(())
}

fn clones_share_one_file() -> Verdict {
    let context = env::open()?;
    let clone = context.clone();
    let pd = clone.alloc_pd()?;
    // Objects of one file work together, no matter which clone made them.
    let td = context.alloc_td()?;
    pd.parent_domain_builder().thread_domain(&td).build()?;
    let listed = supported(context.handles(ObjectKind::PD), Capability::InfoHandles)?;
    assert_eq!(listed, [pd.handle()]);
    assert_eq!(clone.handles(ObjectKind::PD)?, listed);
    Ok(())
}

fn each_context_has_its_own_file() -> Verdict {
    let (one, other) = (env::open()?, env::open()?);
    let one = rustix::io::fcntl_getfd(one.as_fd())?;
    let other = rustix::io::fcntl_getfd(other.as_fd())?;
    assert!(one.contains(rustix::io::FdFlags::CLOEXEC));
    assert!(other.contains(rustix::io::FdFlags::CLOEXEC));
    Ok(())
}

fn objects_keep_the_context_open() -> Verdict {
    let before = env::resources()?;
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    drop(context);
    assert_eq!(env::resources()?.pd(), before.pd() + 1);
    drop(pd);
    // Nothing outlives its last handle.
    env::unchanged(&before)
}

fn node() -> String {
    format!("/dev/infiniband/{}", env::device().uverbs_name().expect("it has a node"))
}

fn passed_file_becomes_a_context() -> Verdict {
    env::node()?;
    // In the form in which a supervisor passes it: without `O_CLOEXEC`.
    let file = OpenOptions::new().read(true).write(true).open(node())?;
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty())?;
    let context = Context::from_fd(file.into())?;
    assert_eq!(context.device(), &env::device());
    let flags = rustix::io::fcntl_getfd(context.as_fd())?;
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "{flags:?}");
    let pd = context.alloc_pd()?;
    pd.mr_builder().access(Access::ALL_REMOTE).allocate::<u8>(100)?;
    assert_eq!(Device::by_path(node())?.device_number(), env::device().device_number());
    assert_eq!(Context::open(&Device::by_path(node())?)?.device().name(), env::device().name());
    Ok(())
}

fn unfit_files_are_refused_with_the_reason() -> Verdict {
    env::node()?;
    let read_only = OpenOptions::new().read(true).open(node())?;
    let error = Context::from_fd(read_only.into()).unwrap_err();
    assert!(error.errno() == Errno::INVAL && error.message().contains("O_RDWR"), "{error}");
    let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
    let error = Context::from_fd(null.into()).unwrap_err();
    assert!(error.errno() == Errno::NODEV && error.message().contains("1:3"), "{error}");
    let taken = env::open()?.share()?;
    let error = Context::from_fd(taken).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    assert!(error.message().contains("Context::import"), "{error}");
    Ok(())
}
