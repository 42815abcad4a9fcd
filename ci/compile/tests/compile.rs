//! Programs that must not compile. Each has a twin that differs from it by one token and compiles, which
//! shows the reason.
//!
//! The twins are modules of this test, so that one run of the compiler judges them all.
//!
//! `TRYBUILD=overwrite cargo test -p compile-tests` writes the expected messages anew.

use std::fs;
use std::path::{Path, PathBuf};

macro_rules! twins {
    ($($path:literal $name:ident),+ $(,)?) => {
        $(
            #[allow(
                clippy::undocumented_unsafe_blocks,
                clippy::let_underscore_future,
                clippy::unit_arg,
                reason = "these are calls that are only compiled"
            )]
            #[path = $path]
            mod $name;
        )+

        /// The files of the twins, beside this one.
        const TWINS: &[&str] = &[$($path),+];
    };
}

twins! {
    "compile/batch_keeps_its_queue_pair.pass.rs" batch_keeps_its_queue_pair,
    "compile/completion_is_lent_until_the_next.pass.rs" completion_is_lent_until_the_next,
    "compile/completion_queue_is_inside_its_pointer.pass.rs" completion_queue_is_inside_its_pointer,
    "compile/destination_keeps_its_address.pass.rs" destination_keeps_its_address,
    "compile/destroying_a_strangers_is_a_promise.pass.rs" destroying_a_strangers_is_a_promise,
    "compile/dma_buf_of_a_queue_stays_in.pass.rs" dma_buf_of_a_queue_stays_in,
    "compile/domain_view_is_not_kept.pass.rs" domain_view_is_not_kept,
    "compile/exclusive_ring_takes_the_token.pass.rs" exclusive_ring_takes_the_token,
    "compile/future_borrows_its_inline_bytes.pass.rs" future_borrows_its_inline_bytes,
    "compile/keys_are_not_exchanged.pass.rs" keys_are_not_exchanged,
    "compile/lent_buffer_is_gone.pass.rs" lent_buffer_is_gone,
    "compile/one_batch_at_a_time.pass.rs" one_batch_at_a_time,
    "compile/polling_is_exclusive.pass.rs" polling_is_exclusive,
    "compile/posting_is_exclusive.pass.rs" posting_is_exclusive,
    "compile/programs_buffer_does_not_borrow.pass.rs" programs_buffer_does_not_borrow,
    "compile/programs_buffer_is_a_promise.pass.rs" programs_buffer_is_a_promise,
    "compile/programs_buffer_is_gone_while_lent.pass.rs" programs_buffer_is_gone_while_lent,
    "compile/programs_buffer_is_not_scoped.pass.rs" programs_buffer_is_not_scoped,
    "compile/regions_hold_plain_bytes.pass.rs" regions_hold_plain_bytes,
    "compile/registered_memory_is_owned.pass.rs" registered_memory_is_owned,
    "compile/ringing_is_a_promise.pass.rs" ringing_is_a_promise,
    "compile/scope_outlived_by_what_it_borrows.pass.rs" scope_outlived_by_what_it_borrows,
    "compile/scoped_receive_is_not_read_before.pass.rs" scoped_receive_is_not_read_before,
    "compile/scoped_registration_is_of_its_scope.pass.rs" scoped_registration_is_of_its_scope,
    "compile/scoped_registration_stays_in.pass.rs" scoped_registration_stays_in,
    "compile/shared_buffer_is_only_read.pass.rs" shared_buffer_is_only_read,
    "compile/shared_buffer_receives_nothing.pass.rs" shared_buffer_receives_nothing,
    "compile/taking_over_is_a_promise.pass.rs" taking_over_is_a_promise,
    "compile/thread_domain_is_one.pass.rs" thread_domain_is_one,
    "compile/unowned_memory_is_not_accessed.pass.rs" unowned_memory_is_not_accessed,
    "compile/visited_request_is_lent.pass.rs" visited_request_is_lent,
    "compile/visited_tag_is_not_shared.pass.rs" visited_tag_is_not_shared,
    "compile/worker_has_the_only_token.pass.rs" worker_has_the_only_token,
    "compile/workers_futures_stay_on_their_thread.pass.rs" workers_futures_stay_on_their_thread,
    "compile/workers_handles_are_not_shared.pass.rs" workers_handles_are_not_shared,
}

fn programs(ending: &str) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compile");
    let mut found: Vec<PathBuf> = fs::read_dir(directory)
        .expect("the programs")
        .map(|entry| entry.expect("a program").path())
        .filter(|path| path.to_string_lossy().ends_with(ending))
        .collect();
    found.sort();
    found
}

/// Words and single signs; layout does not matter.
fn tokens(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    let mut tokens: Vec<String> = Vec::new();
    let mut in_word = false;
    for sign in text.chars() {
        let word = sign.is_alphanumeric() || sign == '_';
        match tokens.last_mut() {
            Some(last) if word && in_word => last.push(sign),
            _ if sign.is_whitespace() => {}
            _ => tokens.push(sign.into()),
        }
        in_word = word;
    }
    tokens
}

#[test]
fn twins_differ_by_one_token() {
    let programs = programs(".fail.rs");
    assert!(programs.len() >= 13, "{programs:?}");
    for program in programs {
        let twin = PathBuf::from(program.to_string_lossy().replace(".fail.rs", ".pass.rs"));
        let (fails, passes) = (tokens(&program), tokens(&twin));
        let alike = fails.iter().zip(&passes).take_while(|(a, b)| a == b).count();
        let (fails, passes) = (&fails[alike..], &passes[alike..]);
        let behind = fails.iter().rev().zip(passes.iter().rev()).take_while(|(a, b)| a == b);
        let behind = behind.count().min(fails.len()).min(passes.len());
        let (fails, passes) = (fails.len() - behind, passes.len() - behind);
        assert!(fails <= 1 && passes <= 1 && fails + passes > 0, "{program:?}: {fails}, {passes}");
    }
}

#[test]
fn all_twins_are_compiled() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let compiled: Vec<PathBuf> = TWINS.iter().map(|path| directory.join(path)).collect();
    assert_eq!(compiled, programs(".pass.rs"));
}

#[test]
fn programs_that_must_not_compile_do_not() {
    trybuild::TestCases::new().compile_fail("tests/compile/*.fail.rs");
}
