//! A socket at a path. It replaces the socket of a server that is gone, and nothing else.
//!
//! `connectx` includes this file.

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use std::fs::{self, File};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

/// A second.
const LOCK_TRIES: u32 = 1000;
const LOCK_PAUSE: Duration = Duration::from_millis(1);

/// A listener whose path is removed with it, if the path is still its own.
#[derive(Debug)]
pub(crate) struct Listening {
    pub(crate) listener: UnixListener,
    path: PathBuf,
    identity: Option<(u64, u64)>,
}

impl Listening {
    /// Listens at a path.
    pub(crate) fn at(path: &Path) -> Result<Listening> {
        // Another server may remove or bind a socket in the meantime. While it binds, the kernel answers ECONNREFUSED
        // as if no server had the path. A folder that cannot be locked is no error as long as the path is free.
        let lock = lock_folder(path);
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => replace_stale(path, lock)?,
            bound => bound?,
        };
        let identity = fs::symlink_metadata(path).map(|now| (now.dev(), now.ino())).ok();
        Ok(Listening { listener, path: path.to_owned(), identity })
    }

    /// Removes the path, so that later clients learn that no server is there.
    pub(crate) fn remove(&self) {
        let now = fs::symlink_metadata(&self.path).map(|now| (now.dev(), now.ino())).ok();
        if now.is_some() && now == self.identity {
            let _gone = fs::remove_file(&self.path);
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Binds in place of a socket without a server; an error names any other obstacle.
fn replace_stale(path: &Path, lock: Result<File>) -> Result<UnixListener> {
    match refuse_others(path) {
        Ok(()) => {
            let _locked = lock?;
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        // The other server has ended, and has removed it.
        Err(error) if error.kind() == ErrorKind::NotFound => UnixListener::bind(path),
        Err(error) => Err(error),
    }
}

/// Locks the folder of a path until the file is closed. Servers lock it for microseconds; another program may keep it.
fn lock_folder(path: &Path) -> Result<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = File::open(folder.unwrap_or(Path::new(".")))?;
    for _ in 0..LOCK_TRIES {
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => sleep(LOCK_PAUSE),
            locked => return locked.map(|()| folder).map_err(Error::from),
        }
    }
    let what =
        "another process keeps the folder of this socket locked: end it, or take another path";
    Err(Error::new(ErrorKind::ResourceBusy, what))
}

/// Fails unless the path is a socket without a server.
fn refuse_others(path: &Path) -> Result<()> {
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        let what = "a file that is no socket is there, and stays: remove it, or take another path";
        return Err(Error::new(ErrorKind::AlreadyExists, what));
    }
    // A datagram socket does not connect to a stream server, which would count the connection as a client: the kernel
    // answers EPROTOTYPE if a server has the path, and ECONNREFUSED if none has.
    let probe = socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    match connect(&probe, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => Ok(()),
        Ok(()) | Err(Errno::PROTOTYPE) => {
            let what = "another process serves this socket: end it, or take another path";
            Err(Error::new(ErrorKind::AddrInUse, what))
        }
        Err(errno) => {
            let what =
                format!("a socket is there, and cannot be asked whether it is served: {errno}");
            Err(Error::new(ErrorKind::AddrInUse, what))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::process;

    /// A path in a folder of its own.
    fn place(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("uverbs-socket-{}-{name}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder.join("socket")
    }

    fn clear(path: &Path) {
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_socket_without_a_server_is_replaced() {
        let path = place("stale");
        drop(UnixListener::bind(&path).unwrap());
        let listening = Listening::at(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        drop(listening);
        assert!(!path.exists());
        drop(UnixDatagram::bind(&path).unwrap());
        Listening::at(&path).unwrap();
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
        clear(&path);
    }

    /// The longest path that [`UnixListener`] binds has 107 bytes.
    #[test]
    fn the_longest_paths_are_replaced_as_well() {
        const LONGEST: usize = 107;
        for name in ["s", "socket", "a-name-of-some-length"] {
            let outer = place("long").parent().unwrap().to_owned();
            let filled = outer.as_os_str().len() + "//".len() + name.len();
            let folder = outer.join("x".repeat(LONGEST - filled));
            fs::create_dir(&folder).unwrap();
            let path = folder.join(name);
            assert_eq!(path.as_os_str().len(), LONGEST);
            drop(UnixListener::bind(&path).unwrap());
            let listening = Listening::at(&path).unwrap();
            assert_eq!(Listening::at(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
            UnixStream::connect(&path).unwrap();
            drop(listening);
            assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
            fs::remove_dir_all(outer).unwrap();
        }
    }

    #[test]
    fn files_of_other_kinds_stay() {
        let path = place("file");
        fs::write(&path, "text").unwrap();
        assert_eq!(Listening::at(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"text");
        let link = path.with_file_name("link");
        for target in ["nowhere", "socket", "stale"] {
            drop(UnixListener::bind(path.with_file_name("stale")));
            symlink(target, &link).unwrap();
            assert_eq!(Listening::at(&link).unwrap_err().kind(), ErrorKind::AlreadyExists);
            assert_eq!(fs::read_link(&link).unwrap(), Path::new(target));
            fs::remove_file(&link).unwrap();
        }
        let folder = path.parent().unwrap();
        assert_eq!(Listening::at(folder).unwrap_err().kind(), ErrorKind::AlreadyExists);
        clear(&path);
    }

    #[test]
    fn a_server_keeps_its_path_and_sees_no_client() {
        let path = place("served");
        let first = Listening::at(&path).unwrap();
        assert_eq!(Listening::at(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
        first.listener.set_nonblocking(true).unwrap();
        assert_eq!(first.listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        UnixStream::connect(&path).unwrap();
        drop(first);
        let datagrams = UnixDatagram::bind(&path).unwrap();
        assert_eq!(Listening::at(&path).unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(datagrams);
        clear(&path);
    }

    /// Several servers start at once where an earlier one left its socket.
    #[test]
    fn one_server_of_several_gets_the_path() {
        let path = place("several");
        for _ in 0..100 {
            drop(UnixListener::bind(&path).unwrap());
            let started: Vec<_> = std::thread::scope(|threads| {
                let start = || threads.spawn(|| Listening::at(&path));
                let started: Vec<_> = (0..4).map(|_| start()).collect();
                started.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let servers: Vec<_> = started.into_iter().filter_map(Result::ok).collect();
            let [server] = &servers[..] else { panic!("{servers:?}") };
            UnixStream::connect(&path).unwrap();
            server.listener.accept().unwrap();
            drop(servers);
            assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
        }
        clear(&path);
    }

    /// Threads of one process replace sockets that other servers left in one folder.
    #[test]
    fn servers_in_one_folder_do_not_disturb_each_other() {
        let folder = place("folder").parent().unwrap().to_owned();
        let paths = ["one", "two", "three", "four"].map(|name| folder.join(name));
        for _ in 0..100 {
            paths.iter().for_each(|path| drop(UnixListener::bind(path).unwrap()));
            std::thread::scope(|threads| {
                for path in &paths {
                    threads.spawn(|| drop(Listening::at(path).unwrap()));
                }
            });
            assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        }
        fs::remove_dir_all(folder).unwrap();
    }

    /// A path without a socket needs no lock.
    #[test]
    fn a_folder_that_another_program_locks_is_an_error() {
        let path = place("locked");
        let lock = lock_folder(&path).unwrap();
        drop(Listening::at(&path).unwrap());
        drop(UnixListener::bind(&path).unwrap());
        assert_eq!(Listening::at(&path).unwrap_err().kind(), ErrorKind::ResourceBusy);
        drop(lock);
        Listening::at(&path).unwrap();
        clear(&path);
    }

    #[test]
    fn the_path_of_a_later_server_is_not_removed() {
        let path = place("later");
        let first = Listening::at(&path).unwrap();
        fs::rename(&path, path.with_file_name("moved")).unwrap();
        let second = Listening::at(&path).unwrap();
        drop(first);
        UnixStream::connect(&path).unwrap();
        drop(second);
        clear(&path);
    }
}
