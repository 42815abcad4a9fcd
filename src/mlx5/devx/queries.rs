//! Queries of objects that do not wait for firmware: the answers arrive at a file.

use super::command::{check, explain, file_of, half};
use super::events::check_device;
use super::object::{DevxTarget, check_query};
use crate::context::Context;
use crate::error::{Error, Result};
use crate::events::file::set_nonblocking;
use crate::events::wait::{read_some, wait_readable};
use crate::file::File;
use crate::uverbs::command::Command;
use crate::uverbs::fd::create_devx_command_file;
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use uverbs_uapi::mlx5::devx as uapi;
use uverbs_uapi::mlx5::object::MLX5_IB_OBJECT_DEVX_OBJ;

const QUERY: &str = "devx_obj_query_async";
const GET: &str = "devx_get_async_cmd_comp";
/// Bytes of the header of a record.
const HEADER: usize = size_of::<uapi::mlx5_ib_uapi_devx_async_cmd_hdr>();

/// The answer to a query.
#[doc(alias = "mlx5dv_devx_async_cmd_hdr")]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DevxAnswer {
    /// The number that the program gave the query.
    pub wr_id: u64,
    /// The output of the command, as long as was asked for.
    pub output: Vec<u8>,
}

impl DevxAnswer {
    /// Checks that firmware answered the query instead of refusing it.
    ///
    /// # Errors
    ///
    /// Firmware's refusal of the query, by its status and syndrome. An output of zeros passes: the kernel answers so as well
    /// where the command timed out or the device failed meanwhile.
    pub fn check(&self) -> Result<()> {
        match self.output.first() {
            Some(0) => Ok(()),
            _ => Err(explain(Error::new(QUERY, Errno::REMOTEIO), "the query", &self.output)),
        }
    }
}

/// A file at which the answers to queries arrive. It is non-blocking, and readable when there is an answer. All methods may be
/// called from any thread; each answer reaches one of them.
///
/// ```no_run
/// # fn f(context: &uverbs::Context, counters: &uverbs::mlx5::devx::DevxObject) -> uverbs::Result<()> {
/// use uverbs::mlx5::devx::{DevxAnswer, DevxQueries};
/// use uverbs_uapi::mlx5::prm::{command, opcode};
///
/// let queries = DevxQueries::create(context)?;
/// let mut query = command::<32>(opcode::QUERY_Q_COUNTER);
/// query[31] = counters.number() as u8;
/// queries.query(counters, &query, 256, 7)?;
/// if let Some(answer) = queries.wait(None)? {
///     answer.check()?;
///     let DevxAnswer { wr_id, output, .. } = answer;
///     println!("query {wr_id}: {} bytes", output.len());
/// }
/// assert_eq!(queries.try_next()?, None);
/// # Ok(()) }
/// ```
#[doc(alias = "mlx5dv_devx_cmd_comp")]
#[derive(Debug)]
pub struct DevxQueries {
    file: Arc<File>,
    fd: OwnedFd,
    /// The longest output that was asked for.
    most: AtomicUsize,
}

impl DevxQueries {
    /// Creates the file. Dropping it waits for the queries that are under way, and drops their answers.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` on a device of another driver and without DEVX; `EMFILE` or `ENFILE` when the process or the system has no
    /// file left.
    #[doc(alias = "mlx5dv_devx_create_cmd_comp")]
    #[doc(alias = "mlx5dv_devx_destroy_cmd_comp")]
    pub fn create(context: &Context) -> Result<DevxQueries> {
        const VERB: &str = "devx_create_cmd_comp";
        let file = file_of(VERB, context)?.clone();
        let fd = create_devx_command_file(&*file.kernel);
        let fd = fd.map_err(|errno| {
            let name = file.device.name();
            Error::from_kernel(VERB, errno).context(|| format!("no file of answers of {name}"))
        })?;
        set_nonblocking(fd.as_fd(), true).map_err(|errno| Error::new(VERB, errno))?;
        Ok(DevxQueries { file, fd, most: AtomicUsize::new(0) })
    }

    /// Sends a query of an object, and does not wait. The answer has `length` bytes and the number `wr_id`. Firmware's refusal
    /// is in the [answer](DevxAnswer::check).
    ///
    /// # Errors
    ///
    /// As [`query`](super::query); `EINVAL` for an object of another context; `EAGAIN` while answers of 1 MiB are under way or
    /// unread.
    #[doc(alias = "mlx5dv_devx_obj_query_async")]
    pub fn query(
        &self,
        target: &(impl DevxTarget + ?Sized),
        input: &[u8],
        length: u16,
        wr_id: u64,
    ) -> Result<()> {
        check_query(QUERY, input)?;
        check(QUERY, input, length.into())?;
        let (context, handle) = target.target();
        self.file.check_same(QUERY, "object", &context.file)?;
        // Before the answer is there.
        self.most.fetch_max(length.into(), Ordering::Relaxed);
        let mut command =
            Command::new(MLX5_IB_OBJECT_DEVX_OBJ, uapi::MLX5_IB_METHOD_DEVX_OBJ_ASYNC_QUERY);
        command
            .handle(uapi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_HANDLE, handle)
            .input(uapi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_CMD_IN, input)
            .fd(uapi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_FD, self.fd.as_fd())
            .u64(uapi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_WR_ID, wr_id)
            .u64(uapi::MLX5_IB_ATTR_DEVX_OBJ_QUERY_ASYNC_OUT_LEN, length.into());
        self.file.execute(QUERY, &mut command).map_err(|error| match error.errno() {
            Errno::INVAL => error.detail(format!(
                "the kernel does not take the command {:#x} as a query of this object, or not without waiting, as \
                 that of general objects since a release about Linux 6.17",
                half(input, 0)
            )),
            Errno::AGAIN => error.detail("read answers first: 1 MiB of them is the limit"),
            _ => error,
        })
    }

    /// Reads the next answer; `None` if there is none at the moment.
    ///
    /// # Errors
    ///
    /// `EIO` when the device is gone and no answer is left.
    #[doc(alias = "mlx5dv_devx_get_async_cmd_comp")]
    pub fn try_next(&self) -> Result<Option<DevxAnswer>> {
        self.file.check_fork(GET)?;
        let (record, length) = loop {
            let most = self.most.load(Ordering::Relaxed);
            let mut record = vec![0; HEADER + most];
            match read_some(GET, self.fd.as_fd(), &mut record) {
                Ok(Some(length)) => break (record, length),
                Ok(None) => return check_device(GET, self.fd.as_fd()).map(|()| None),
                // Another thread has asked for a longer answer meanwhile.
                Err(error)
                    if error.errno() == Errno::NOSPC
                        && self.most.load(Ordering::Relaxed) > most => {}
                Err(error) => return Err(error),
            }
        };
        let Some((wr_id, output)) = record[..length].split_first_chunk::<HEADER>() else {
            return Err(Error::new(GET, Errno::PROTO)
                .detail(format!("the kernel answered {length} bytes, fewer than a header")));
        };
        let wr_id = u64::from_ne_bytes(*wr_id);
        Ok(Some(DevxAnswer { wr_id, output: output.to_vec() }))
    }

    /// Waits for an answer, at most for `timeout`, for ever without one. `None` after the timeout.
    ///
    /// # Errors
    ///
    /// As [`try_next`](Self::try_next).
    #[doc(alias = "mlx5dv_devx_get_async_cmd_comp")]
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<DevxAnswer>> {
        let platform = self.file.kernel.platform();
        wait_readable(GET, &platform, self.fd.as_fd(), timeout, || self.try_next())
    }
}

impl AsFd for DevxQueries {
    /// The file, which is readable when there is an answer.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_firmware_are_in_the_answer() {
        let answer = |status| {
            let mut output = vec![0; 16];
            (output[0], output[7]) = (status, 0x2a);
            DevxAnswer { wr_id: 1, output }
        };
        assert_eq!(answer(0).check().map_err(|error| error.errno()), Ok(()));
        let error = answer(0x05).check().unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL);
        assert!(error.to_string().contains("bad resource, syndrome 0x2a"), "{error}");
        assert!(DevxAnswer { wr_id: 1, output: vec![] }.check().is_err());
    }
}
