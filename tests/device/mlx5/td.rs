//! Thread domains: doorbell registers that are lent and come back.

use crate::capability::Capability;
use crate::env;
use crate::leaks::rounds;
use crate::verdict::{Verdict, require, trials};
use uverbs::mlx5::query_device;
use uverbs::{Errno, ObjectKind, QpType};

trials![
    registers_are_recycled,
    a_domain_in_use_is_busy,
    exhaustion_names_the_number_of_domains,
    domains_leave_nothing,
];

fn registers_are_recycled() -> Verdict {
    let context = super::open()?;
    let pages = || context.handles(ObjectKind::MLX5_UAR).map(|handles| handles.len());
    let before = pages()?;
    let combines = query_device(&context)?.blueflame_bytes() > 0;
    let five = (0..5).map(|_| context.alloc_td()).collect::<uverbs::Result<Vec<_>>>()?;
    let most = pages()?;
    // Without combining all share the page that is there already.
    assert_eq!(most - before, if combines { super::pages_for(5) } else { 0 });
    drop(five);
    for _ in 0..100 {
        let td = context.alloc_td()?;
        td.destroy()?;
    }
    let six = (0..6).map(|_| context.alloc_td()).collect::<uverbs::Result<Vec<_>>>()?;
    assert_eq!(pages()?, most, "registers that came back are lent again");
    drop(six);
    Ok(())
}

fn a_domain_in_use_is_busy() -> Verdict {
    let context = super::open()?;
    let pd = context.alloc_pd()?;
    let td = context.alloc_td()?;
    let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
    let (td, error) = td.destroy().unwrap_err().into_parts();
    assert_eq!(error.errno(), Errno::BUSY);
    drop(domain);
    td.destroy()?;
    Ok(())
}

fn exhaustion_names_the_number_of_domains() -> Verdict {
    /// More registers than any device of the lab has, and few enough to try.
    const MANY: usize = 1 << 14;
    env::alone()?;
    let context = super::open()?;
    // If the driver found that writes do not combine, all domains share one register.
    let combines = query_device(&context)?.blueflame_bytes() > 0;
    let mut domains = Vec::new();
    let error = loop {
        match context.alloc_td() {
            Ok(td) => domains.push(td),
            Err(error) => break Some(error),
        }
        if domains.len() == MANY {
            break None;
        }
    };
    if !combines {
        assert_eq!(error.map(|error| error.to_string()), None);
        return Ok(());
    }
    let Some(error) = error else {
        // A machine's own device may have more.
        let lab = std::env::var("UVERBS_LAB").is_ok();
        assert!(!lab, "the emulated device has {MANY} registers and more");
        let why = format!("{MANY} thread domains did not exhaust the device");
        return require(false, Capability::Lab, &why);
    };
    let count = format!("have {}", domains.len());
    assert!(error.message().contains(&count), "{error}: {}", domains.len());
    // A dropped domain returns its register to the next one.
    domains.pop();
    context.alloc_td()?;
    Ok(())
}

fn domains_leave_nothing() -> Verdict {
    // A context keeps its pages of registers.
    rounds(&[ObjectKind::MLX5_UAR, ObjectKind::PD, ObjectKind::QP], |context| {
        super::open()?;
        let context = context.clone();
        let pd = context.alloc_pd()?;
        let cq = context.cq_builder(4).build()?;
        Ok(Box::new(move || {
            let td = context.alloc_td()?;
            let domain = pd.parent_domain_builder().thread_domain(&td).build()?;
            drop(domain.qp_builder(&cq, &cq, QpType::RC).build()?);
            domain.destroy()?;
            td.destroy()?;
            Ok(())
        }))
    })
}
