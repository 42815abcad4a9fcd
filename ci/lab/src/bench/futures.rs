//! Suite `rxe-futures`: the cost of waiting by futures in tokio's event loop beside rdma-core's
//! blocking wait for the same events.

use super::BenchArguments;
use super::pingpong::{PingPongOperation, Program};
use super::rxe::{Contest, measure};
use super::score::Score;
use crate::workspace::Profile;
use anyhow::Result;

/// Measures the operations that futures do: reliable connections with events.
pub(super) fn run(arguments: &BenchArguments) -> Result<Score> {
    let operations = PingPongOperation::all()
        .into_iter()
        .filter(|operation| operation.kind == "rc" && operation.events);
    measure(arguments, operations.map(Contest::PingPong), Program::Futures, |workspace| {
        let program = workspace.static_example("uverbs", "pingpong", "tokio", Profile::Whole)?;
        Ok(vec![("futures-pingpong".to_owned(), program)])
    })
}
