//! The driver's attributes of a context.

use crate::env;
use crate::verdict::{Verdict, trials};
use uverbs::Errno;
use uverbs::device::DriverId;
use uverbs::mlx5;

trials![attributes_are_plausible, other_drivers_have_no_mlx5_attributes];

fn attributes_are_plausible() -> Verdict {
    let context = super::open()?;
    let attr = mlx5::query_device(&context)?;
    let blueflame = attr.blueflame_bytes();
    assert!(blueflame == 0 || blueflame.is_power_of_two() && blueflame >= 64, "{attr:?}");
    assert!(attr.max_send_request() >= 256 && attr.max_recv_request() >= 64, "{attr:?}");
    assert!(attr.max_send_blocks().is_power_of_two(), "{attr:?}");
    let verbs = context.query_device()?;
    assert_eq!(attr.max_shared_receives(), verbs.max_srq_wr + 1, "{attr:?}");
    Ok(())
}

fn other_drivers_have_no_mlx5_attributes() -> Verdict {
    let context = env::open()?;
    if env::device().driver() == Some(DriverId::MLX5) {
        // The other half of the promise: on mlx5 the attributes are there.
        mlx5::query_device(&context)?;
        return Ok(());
    }
    let errors = [
        mlx5::query_device(&context).map(drop).unwrap_err(),
        mlx5::Uar::alloc(&context, mlx5::UarKind::NonCached).map(drop).unwrap_err(),
        mlx5::Var::alloc(&context, mlx5::VarKind::Virtio).map(drop).unwrap_err(),
        mlx5::Clock::open(&context).map(drop).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.errno(), Errno::OPNOTSUPP, "{error}");
        assert_eq!(error.kernel_errno(), None, "{error}");
    }
    Ok(())
}
