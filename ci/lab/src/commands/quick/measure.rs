//! Measures the time of `cargo ci quick` and the defects that it catches. Edits and defects are
//! made in a copy of the workspace, and each one is tested with `cargo ci quick`.

use crate::output::outln;
use crate::workspace::mistake::{Edit, replaced};
use crate::workspace::{Workspace, copy_tree};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The aim for the median of the edits.
const AIM: Duration = Duration::from_secs(60);
/// How many of the defects have to be caught.
const CAUGHT: usize = 8;

/// Edits without an effect, one in each part of the library that is edited most. They measure what
/// testing a change costs.
const EDITS: &[Defect] = &[
    Defect {
        name: "provider_mlx5",
        edit: Edit {
            file: "src/provider/mlx5/sq.rs",
            from: "self.dbrec.set(cursor.at & 0xffff);",
            to: "self.dbrec.set(0xffff & cursor.at);",
        },
    },
    Defect {
        name: "qp",
        edit: Edit {
            file: "src/qp/control.rs",
            from: "if self.qp.is_stale() {",
            to: "let stale = self.qp.is_stale();\n        if stale {",
        },
    },
    Defect {
        name: "owned",
        edit: Edit {
            file: "src/owned/lending.rs",
            from: "self.lender.room()",
            to: "let room = self.lender.room();\n        room",
        },
    },
    Defect {
        name: "aio",
        edit: Edit {
            file: "src/aio/op.rs",
            from: "self.wr_id().is_some()",
            to: "let posted = self.wr_id();\n        posted.is_some()",
        },
    },
    Defect {
        name: "uapi",
        edit: Edit {
            file: "uapi/src/cq.rs",
            // Documentation is part of a crate's metadata, so dependants are rebuilt.
            from: "/// Command `IB_USER_VERBS_CMD_CREATE_CQ`. `comp_channel`",
            to: "/// The command `IB_USER_VERBS_CMD_CREATE_CQ`. `comp_channel`",
        },
    },
];

/// Typical mistakes: a wrong operator, a swapped operand, a missing step. At least `CAUGHT` of
/// these ten must fail a test.
const DEFECTS: &[Defect] = &[
    Defect {
        name: "a_read_is_posted_as_a_write",
        edit: Edit {
            file: "src/provider/mlx5/sq.rs",
            from: "(opcode::MLX5_OPCODE_RDMA_READ, WcOpcode::READ)",
            to: "(opcode::MLX5_OPCODE_RDMA_WRITE, WcOpcode::READ)",
        },
    },
    Defect {
        name: "arming_for_solicited_completions_is_reversed",
        edit: Edit {
            file: "src/provider/mlx5/cq.rs",
            from: "let command = if solicited {",
            to: "let command = if !solicited {",
        },
    },
    Defect {
        name: "consumed_cqes_are_not_given_back",
        edit: Edit {
            file: "src/provider/mlx5/cq.rs",
            from: "self.consumed.set(self.reader.consumer());",
            to: "let _ = self.reader.consumer();",
        },
    },
    Defect {
        name: "the_handshake_swaps_the_packet_sequence_numbers",
        edit: Edit {
            file: "src/qp/endpoint.rs",
            from: ".rq_psn(remote.psn);",
            to: ".rq_psn(local.endpoint.psn);",
        },
    },
    Defect {
        name: "the_larger_mtu_is_agreed_on",
        edit: Edit {
            file: "src/qp/endpoint.rs",
            from: ".path_mtu(local.endpoint.mtu.min(remote.mtu))",
            to: ".path_mtu(local.endpoint.mtu.max(remote.mtu))",
        },
    },
    Defect {
        name: "a_buffer_of_another_domain_is_taken",
        edit: Edit {
            file: "src/owned/lending.rs",
            from: "memory.region_sge().is_none_or(|known| known.domain == *self.domain)",
            to: "memory.region_sge().is_none_or(|known| known.domain == *self.domain || true)",
        },
    },
    Defect {
        name: "loans_of_sends_and_receives_are_taken_back_from_the_wrong_table",
        edit: Edit {
            file: "src/owned/qp_map.rs",
            from: "if wr_id & RECV == 0 { send } else { recv }",
            to: "if wr_id & RECV != 0 { send } else { recv }",
        },
    },
    Defect {
        name: "a_request_without_room_is_tried_only_once",
        edit: Edit {
            file: "src/aio/op.rs",
            from: "error: PostError::Full, .. }) => return Poll::Pending,",
            to: "error: PostError::Full, .. }) => {\n                *stage = Stage::Over;\n                return Poll::Pending;\n            }",
        },
    },
    Defect {
        name: "a_dropped_future_does_not_abandon_its_request",
        edit: Edit {
            file: "src/aio/op.rs",
            from: "self.queue.inflight.abandon(*wr_id);",
            to: "let _ = wr_id;",
        },
    },
    Defect {
        name: "two_fields_of_an_abi_struct_are_swapped",
        edit: Edit {
            file: "uapi/src/cq.rs",
            from: "cqe: u32 = 16,\n        comp_vector: u32 = 20,",
            to: "comp_vector: u32 = 16,\n        cqe: u32 = 20,",
        },
    },
];

/// An edit with a name.
struct Defect {
    name: &'static str,
    edit: Edit,
}

/// A copy of the workspace with builds of its own.
struct Copy {
    root: PathBuf,
}

impl Copy {
    /// Makes the copy and tests it once, so that everything is built.
    fn new(workspace: &Workspace) -> Result<Copy> {
        let root = workspace.lab_directory()?.join("quick/tree");
        // Its builds stay, so that the next run is quicker.
        for entry in fs::read_dir(&root).into_iter().flatten().flatten() {
            match entry.file_type()?.is_dir() {
                true if entry.file_name() == "target" => {}
                true => fs::remove_dir_all(entry.path())?,
                false => fs::remove_file(entry.path())?,
            }
        }
        copy_tree(workspace.root(), &root)?;
        let copy = Copy { root };
        outln!("building the copy in {}", copy.root.display());
        let (passed, _, log) = copy.quick("src/lib.rs")?;
        if !passed {
            bail!("without an edit `cargo ci quick` fails:\n{log}");
        }
        Ok(copy)
    }

    /// Tests the copy with an edit in it. Returns whether it passed, the time and the output.
    fn with(&self, Defect { name, edit }: &Defect) -> Result<(bool, Duration, String)> {
        let path = self.root.join(edit.file);
        let before =
            fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        fs::write(&path, replaced(&before, name, edit)?)?;
        let judged = self.quick(edit.file);
        fs::write(&path, before)?;
        judged
    }

    fn quick(&self, changed: &str) -> Result<(bool, Duration, String)> {
        let start = Instant::now();
        // Not by its path, where cargo may have built another lab meanwhile.
        let output = Command::new("/proc/self/exe")
            .args(["quick", "--changed", changed])
            .current_dir(&self.root)
            .env_remove("CARGO_TARGET_DIR")
            .stdin(Stdio::null())
            .output()
            .context("run the lab in the copy")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        Ok((output.status.success(), start.elapsed(), text))
    }
}

/// Measures edits; returns whether their median is within the aim.
pub(super) fn edits(only: &str) -> Result<bool> {
    let copy = Copy::new(&Workspace::find()?)?;
    let mut times = Vec::new();
    for edit in EDITS.iter().filter(|edit| edit.name.contains(only)) {
        let (passed, time, log) = copy.with(edit)?;
        if !passed {
            bail!("the edit {}, which changes nothing, fails:\n{log}", edit.name);
        }
        outln!("{:14} {:6.1} s", edit.name, time.as_secs_f64());
        times.push(time);
    }
    let Some(median) = median(times) else { bail!("no edit's name contains {only:?}") };
    outln!("the median is {:.1} s, the aim {} s", median.as_secs_f64(), AIM.as_secs());
    Ok(median <= AIM)
}

fn median(mut times: Vec<Duration>) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

/// Plants the defects. Returns a line of text on those caught, and whether they are enough.
pub(crate) fn defects(only: &str) -> Result<(String, bool)> {
    let copy = Copy::new(&Workspace::find()?)?;
    let (mut caught, mut missed) = (0, Vec::new());
    for defect in DEFECTS.iter().filter(|defect| defect.name.contains(only)) {
        let (passed, time, log) = copy.with(defect)?;
        let by = log.lines().find(|line| line.contains("FAILED ") && !line.starts_with("test "));
        let word = if passed { "missed" } else { "caught" };
        outln!("{word} {} ({:.0} s) {}", defect.name, time.as_secs_f64(), by.unwrap_or_default());
        match passed {
            true => missed.push(defect.name),
            false => caught += 1,
        }
    }
    let of = caught + missed.len();
    if of == 0 {
        bail!("no defect's name contains {only:?}");
    }
    let missed_some =
        if missed.is_empty() { String::new() } else { format!("; missed {}", missed.join(", ")) };
    let text = format!("{caught} of {of} caught{missed_some}");
    outln!("{text}");
    // Of a selection all have to be caught.
    Ok((text, caught >= CAUGHT.min(of)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// This fails in seconds, not only after the copy is built.
    #[test]
    fn every_edit_and_defect_can_be_made() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for Defect { name, edit } in EDITS.iter().chain(DEFECTS) {
            let text = fs::read_to_string(root.join(edit.file)).unwrap();
            let changed = replaced(&text, name, edit).unwrap();
            assert_ne!(changed, text, "{name}");
        }
        assert_eq!((EDITS.len(), DEFECTS.len()), (5, 10));
    }

    #[test]
    fn the_median_is_the_one_in_the_middle() {
        let seconds = |list: &[u64]| list.iter().map(|n| Duration::from_secs(*n)).collect();
        assert_eq!(median(seconds(&[30, 90, 10, 50, 20])), Some(Duration::from_secs(30)));
        assert_eq!(median(Vec::new()), None);
    }
}
