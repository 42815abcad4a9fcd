//! What machines will want, fetched and built while host checks run: packages come over the network, and
//! the checks, which are one long compilation after another, leave a processor idle now and then.
//!
//! Nothing depends on it. What fails here is tried again where it is wanted, and told there.

use crate::cache::Cache;
use crate::device::DeviceName;
use crate::examples;
use crate::exec;
use crate::fetch::{self, Needs};
use crate::progress;
use crate::session;
use crate::suite;
use crate::workspace::{Profile, Workspace};
use anyhow::Result;
use std::thread::{self, JoinHandle};

/// Works ahead until it is waited for.
pub(crate) struct Ahead {
    thread: JoinHandle<Result<()>>,
}

impl Ahead {
    /// Begins with everything that a whole run wants on these devices.
    pub(crate) fn begin(needs: Needs, devices: Vec<DeviceName>) -> Ahead {
        let work = move || {
            progress::be_quiet();
            fetch::fetch(&Cache::open()?, &needs, false)?;
            session::programs()?;
            let workspace = Workspace::find()?;
            suite::build(&workspace, &devices)?;
            exec::programs(&workspace, Profile::Checked)?;
            examples::programs(&workspace)?;
            Ok(())
        };
        Ahead { thread: thread::spawn(work) }
    }

    /// Waits for the end of it.
    pub(crate) fn wait(self) {
        let spinner = progress::spinner("what machines want");
        let end = self.thread.join();
        spinner.finish_and_clear();
        if let Ok(Err(error)) = end {
            eprintln!("{error:#}; once more …");
        }
    }
}
