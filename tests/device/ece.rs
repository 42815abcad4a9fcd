//! Options of connections beyond the specification (enhanced connection establishment).

use crate::capability::Capability;
use crate::env;
use crate::pair::{Config, Pair};
use crate::verdict::{Verdict, supported, trials};
use uverbs::{Ece, Errno, QpState, QpType};

trials![
    device_takes_the_options_that_it_has_when_it_connects,
    agreed_options_end_with_a_reset,
    options_are_refused_by_name_where_there_are_none,
];

fn device_takes_the_options_that_it_has_when_it_connects() -> Verdict {
    for qp_type in [QpType::RC, QpType::UC, QpType::UD] {
        let mut pair = Pair::unconnected(Config::of(qp_type))?;
        let offered = supported(pair.a.qp.query_ece(), Capability::Ece)?;
        assert_ne!((offered.vendor_id, offered.options), (0, 0));
        // More options than the device has, of its own version.
        let more = offered.options | 0x0fff_ffff;
        for side in [&pair.a, &pair.b] {
            side.qp.set_ece(Ece { options: more, ..offered })?;
            assert_eq!(side.qp.query_ece()?.options, 0, "nothing is told yet");
        }
        pair.connect()?;
        for side in [&pair.a, &pair.b] {
            assert_eq!((side.qp.state(), side.qp.query_ece()?), (QpState::RTS, offered));
        }
        if qp_type != QpType::UD {
            pair.message(1, 3000)?;
        }
    }
    Ok(())
}

fn agreed_options_end_with_a_reset() -> Verdict {
    let mut pair = Pair::unconnected(Config::rc())?;
    let offered = supported(pair.a.qp.query_ece(), Capability::Ece)?;
    let few = offered.options & !1;
    assert_ne!(few, offered.options, "the device has the lowest of its options");
    for side in [&pair.a, &pair.b] {
        side.qp.set_ece(Ece { options: few, ..offered })?;
    }
    pair.connect()?;
    assert_eq!(pair.a.qp.query_ece()?.options, few);
    pair.message(1, 300)?;
    pair.a.reset()?;
    pair.b.reset()?;
    assert_eq!(pair.a.qp.query_ece()?, offered);
    // A queue pair connects without options, too.
    pair.a.qp.set_ece(Ece { options: 0, ..offered })?;
    pair.connect()?;
    assert_eq!((pair.a.qp.query_ece()?.options, pair.b.qp.query_ece()?), (0, offered));
    pair.message(2, 300)
}

fn options_are_refused_by_name_where_there_are_none() -> Verdict {
    let pair = Pair::unconnected(Config::rc())?;
    let foreign = Ece { vendor_id: 0x1234, options: 1 };
    let error = pair.a.qp.set_ece(foreign).unwrap_err();
    match pair.a.qp.query_ece() {
        Ok(offered) => {
            assert_eq!(error.errno(), Errno::INVAL, "{error}");
            assert!(error.message().contains("vendor 0x1234"), "{error}");
            assert_eq!(pair.a.qp.query_ece()?, offered);
        }
        Err(none) => {
            for error in [error, none] {
                assert_eq!(error.errno(), Errno::OPNOTSUPP, "{error}");
                assert!(error.message().contains(env::device().name()), "{error}");
            }
        }
    }
    Ok(())
}
