//! Contexts: opening, the attributes of the device, when the file closes.

use crate::capability::Capability;
use crate::env;
use crate::verdict::{Verdict, supported, trials};
use std::os::fd::AsFd;
use uverbs::ObjectKind;

trials![
    an_open_context_describes_its_device,
    clones_share_one_file,
    each_context_has_its_own_file,
    objects_keep_the_context_open,
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
    // Objects of one file work together whichever clone made them.
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
    let before = env::device().resources()?;
    let context = env::open()?;
    let pd = context.alloc_pd()?;
    drop(context);
    assert_eq!(env::device().resources()?.pd(), before.pd().map(|count| count + 1));
    drop(pd);
    assert_eq!(env::device().resources()?, before, "something outlived its last handle");
    Ok(())
}
