//! Suite `rxe-futures`: the cost of waiting by futures, in tokio's event loop and in blocking reads, beside rdma-core's
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
        .filter(|operation| operation.kind == "rc" && operation.events)
        .flat_map(|operation| {
            [operation.clone(), PingPongOperation { blocking: true, ..operation }]
        });
    measure(arguments, operations.map(Contest::PingPong), Program::Futures, |workspace| {
        let program = workspace.static_example("uverbs", "pingpong", "tokio", Profile::Whole)?;
        Ok(vec![("futures-pingpong".to_owned(), program)])
    })
}
