//! The library in a container or on a hardened host: this program once more, in a mount namespace of its own, without
//! sysfs, without netlink, with few nodes, or without privileges.

use super::ip;
use crate::capability::Capability;
use crate::cm::{Service, accepted, ask_by, channel, route_from, send};
use crate::confine::{forbid_keeping_from_children, forbid_netlink, forbid_wiping_in_children};
use crate::env;
use crate::pair::{Config, Pair};
use crate::testbed::link_of;
use crate::verdict::{Stop, Verdict, require, trials};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, setrlimit};
use rustix::fs::{CWD, FileType, Mode, major, makedev, minor, mknodat};
use rustix::process::{DumpableBehavior, Gid, Uid, set_dumpable_behavior};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode};
use uverbs::cm::ConnectParam;
use uverbs::device::{DriverId, absence, link};
use uverbs::{Access, Context, Device, Errno, LinkLayer, QpType, passing};

trials![
    node_alone_is_enough,
    first_device_that_opens_is_found,
    empty_list_names_the_permission,
    node_elsewhere_is_opened_by_its_path,
    device_plugin_gives_one_node_of_all_that_are_shown,
    container_that_is_shown_one_device_alone_lists_and_opens_it,
    file_that_a_supervisor_passes_is_enough,
    gid_of_another_network_namespace_is_not_chosen,
    root_of_a_user_namespace_works_within_the_limits_of_its_user,
    node_of_another_device_under_the_name_is_refused,
    node_without_a_device_is_refused,
    open_files_beyond_the_limit_are_refused,
    kernel_that_wipes_no_page_in_children_is_refused,
    huge_pages_that_children_would_get_are_refused_where_the_kernel_does_not_copy_them,
];

/// The first argument of a program that is to run in a sandbox; the second one names the task.
const SANDBOX: &str = "--sandbox";
/// A user without privileges.
const NOBODY: u32 = 65534;
/// Bytes that such a user may lock. The default before Linux 5.16 is 64 KiB, which is too little.
const MEMLOCK: u64 = 4 << 20;

/// Runs as that program, if this process was started as one.
pub(crate) fn run() -> Option<ExitCode> {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() != Some(SANDBOX) {
        return None;
    }
    let arguments: Vec<String> = arguments.collect();
    Some(match task(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(stop) => {
            eprintln!("in the sandbox: {stop:?}");
            ExitCode::FAILURE
        }
    })
}

/// Starts this program for a task on a device, and waits for it.
fn start(task: &str, device: &Device, more: &[&str]) -> Verdict {
    let number = device.device_number().expect("it has a node");
    let driver = device.driver().expect("it has a driver").get();
    let status = Command::new(std::env::current_exe()?)
        .args([SANDBOX, task, device.name(), device.uverbs_name().expect("it has a node")])
        .args([number.major, number.minor, driver].map(|number| number.to_string()))
        .args([device.port_count().to_string(), device.node_guid().to_string()])
        .args(more)
        .status()?;
    if status.success() { Ok(()) } else { Err(Stop::fail(format!("{task}: {status}"))) }
}

/// The device of a task, as the test outside of the sandbox sees it.
struct Subject<'a> {
    name: &'a str,
    node: &'a str,
    number: (u32, u32),
    driver: DriverId,
    ports: u32,
    guid: &'a str,
    more: &'a [String],
}

fn task(arguments: &[String]) -> Verdict {
    let [task, name, node, major, minor, driver, ports, guid, more @ ..] = arguments else {
        return Err(Stop::fail(format!("not the arguments of a task: {arguments:?}")));
    };
    let subject = Subject {
        name,
        node,
        number: (major.parse()?, minor.parse()?),
        driver: DriverId::new(driver.parse()?),
        ports: ports.parse()?,
        guid,
        more,
    };
    if task == "ancient" {
        // The library marks its page when it first opens a device.
        return ancient(&subject);
    }
    // Cached while all of the machine is visible.
    env::port();
    unshare(CloneFlags::CLONE_NEWNS)?;
    mount("--make-rprivate", "/")?;
    match task.as_str() {
        "bare" => bare(&subject),
        "first" => first(&subject),
        "refused" => refused(&subject),
        "path" => path(&subject),
        "plugin" => plugin(&subject),
        "alone" => alone(&subject),
        "supervised" => supervised(&subject),
        "elsewhere" => elsewhere(&subject),
        "unprivileged" => unprivileged(&subject),
        "stale" => stale(&subject),
        "ghost" => ghost(&subject),
        "files" => files(&subject),
        "huge" => huge(&subject),
        _ => Err(Stop::fail(format!("no task {task}"))),
    }
}

fn mount(option: &str, at: &str) -> Verdict {
    let status = Command::new("mount").args(option.split(' ')).arg(at).status()?;
    if status.success() { Ok(()) } else { Err(Stop::fail(format!("mount {option} {at}"))) }
}

/// Covers /sys with an empty file system.
fn hide_sysfs() -> Verdict {
    mount("-t tmpfs none", "/sys")
}

/// Covers /dev/infiniband and /dev/char with empty file systems.
fn hide_nodes() -> Verdict {
    mount("-t tmpfs -o mode=755 none", "/dev/infiniband")?;
    if std::path::Path::new("/dev/char").exists() {
        mount("-t tmpfs -o mode=755 none", "/dev/char")?;
    }
    Ok(())
}

/// Makes a node with these permissions, regardless of the umask.
fn make_node(path: &str, (major, minor): (u32, u32), mode: u32) -> Verdict {
    let mode = Mode::from_raw_mode(mode);
    mknodat(CWD, path, FileType::CharacterDevice, mode, makedev(major, minor))?;
    Ok(rustix::fs::chmod(path, mode)?)
}

fn node_alone_is_enough() -> Verdict {
    env::lab()?;
    start("bare", &env::device(), &[])
}

fn bare(subject: &Subject<'_>) -> Verdict {
    hide_sysfs()?;
    forbid_netlink()?;
    let all = uverbs::devices()?;
    let device = all.iter().find(|device| device.name() == subject.node);
    let device = device.ok_or_else(|| Stop::fail(format!("not among {all:?}")))?;
    assert!(!device.is_described() && device.is_supported(), "{device:?}");
    assert_eq!(device.driver(), Some(subject.driver));
    let number = device.device_number().map(|number| (number.major, number.minor));
    assert_eq!(number, Some(subject.number));
    assert_eq!(Device::by_name(subject.node)?, *device);
    assert_eq!(Device::by_path(format!("/dev/infiniband/{}", subject.node))?, *device);

    let context = Context::open(device)?;
    // The open device knows these itself.
    assert_eq!(context.device().port_count(), subject.ports);
    assert_eq!(context.device().node_guid().to_string(), subject.guid);
    for error in [
        context.device().netdev(env::port()).map(drop).unwrap_err(),
        context.device().resources().map(drop).unwrap_err(),
        context.query_pkey(env::port(), 0).map(drop).unwrap_err(),
    ] {
        assert!(error.is_unsupported() && error.message().contains("netlink"), "{error}");
    }
    assert!(!context.gid_table()?.is_empty());
    let mut pair = Pair::on(context.clone(), context, Config::rc())?;
    pair.connect()?;
    pair.message(1, 5000)?;
    drop(Context::open_first()?);
    Ok(())
}

fn first_device_that_opens_is_found() -> Verdict {
    env::lab()?;
    let (device, second) = (env::device(), env::second()?);
    let number = second.device_number().expect("it has a node");
    let more = [second.uverbs_name().expect("it has a node"), second.name()].map(str::to_owned);
    let numbers = [number.major, number.minor].map(|number| number.to_string());
    start("first", &device, &[&more[0], &numbers[0], &numbers[1], &more[1]])
}

/// The program of the README, on a machine whose first device belongs to another user.
fn first(subject: &Subject<'_>) -> Verdict {
    let [node, major, minor, name] = subject.more else {
        return Err(Stop::fail("no second device was named"));
    };
    hide_nodes()?;
    make_node(&format!("/dev/infiniband/{}", subject.node), subject.number, 0o600)?;
    make_node(&format!("/dev/infiniband/{node}"), (major.parse()?, minor.parse()?), 0o666)?;
    rustix::thread::set_thread_uid(Uid::from_raw(NOBODY))?;
    let both = [Device::by_name(subject.name)?, Device::by_name(name)?];
    let mut skipped = Vec::new();
    let context = Context::open_first_of(both.clone(), |device, error| {
        skipped.push((device.name().to_owned(), error.errno()));
    })?;
    assert_eq!(context.device(), &both[1]);
    assert_eq!(skipped, [(subject.name.to_owned(), Errno::ACCESS)]);
    assert_ne!(Context::open_first()?.device().name(), subject.name);
    let error = Context::open_first_of([both[0].clone()], |_, _| {}).unwrap_err();
    assert_eq!(error.errno(), Errno::ACCESS);
    assert!(error.message().contains("udev"), "{error}");
    Ok(())
}

fn empty_list_names_the_permission() -> Verdict {
    env::lab()?;
    start("refused", &env::device(), &[])
}

fn refused(subject: &Subject<'_>) -> Verdict {
    hide_nodes()?;
    make_node(&format!("/dev/infiniband/{}", subject.node), subject.number, 0o600)?;
    hide_sysfs()?;
    forbid_netlink()?;
    rustix::thread::set_thread_uid(Uid::from_raw(NOBODY))?;
    assert_eq!(uverbs::devices()?, []);
    let why = absence();
    assert_eq!(why.refused.len(), 1, "{why:?}");
    let error = Context::open_first().unwrap_err();
    assert_eq!(error.errno(), Errno::NODEV);
    for part in ["no permission", subject.node, "sysfs is not mounted"] {
        assert!(error.message().contains(part), "{part}: {error}");
    }
    Ok(())
}

fn node_elsewhere_is_opened_by_its_path() -> Verdict {
    env::lab()?;
    start("path", &env::device(), &[])
}

/// As in a container that got one node, under a name of its own.
fn path(subject: &Subject<'_>) -> Verdict {
    hide_nodes()?;
    let error = Context::open(&Device::by_name(subject.name)?).unwrap_err();
    assert_eq!(error.errno(), Errno::NOENT, "{error}");
    assert!(absence().to_string().contains(subject.node), "{}", absence());
    make_node("/dev/infiniband/mine", subject.number, 0o666)?;
    let device = Device::by_path("/dev/infiniband/mine")?;
    assert_eq!(device.name(), subject.name);
    assert_eq!(Context::open(&device)?.device(), &device);
    // The same without sysfs, which describes it.
    hide_sysfs()?;
    forbid_netlink()?;
    let device = Device::by_path("/dev/infiniband/mine")?;
    assert_eq!((device.name(), device.driver()), ("mine", Some(subject.driver)));
    Context::open(&device)?;
    assert!(ip("link").is_err(), "netlink works");
    Ok(())
}

fn device_plugin_gives_one_node_of_all_that_are_shown() -> Verdict {
    env::lab()?;
    start("plugin", &env::second()?, &[env::device().name()])
}

/// As in a pod of Kubernetes, to which a device plugin gave the second device and the connection manager: sysfs and
/// netlink still show the first device.
fn plugin(subject: &Subject<'_>) -> Verdict {
    const RDMA_CM: &str = "/dev/infiniband/rdma_cm";
    let [first] = subject.more else { return Err(Stop::fail("no other device was named")) };
    let manager = std::fs::metadata(RDMA_CM)?.rdev();
    hide_nodes()?;
    make_node(&format!("/dev/infiniband/{}", subject.node), subject.number, 0o666)?;
    make_node(RDMA_CM, (major(manager), minor(manager)), 0o666)?;
    rustix::thread::set_thread_uid(Uid::from_raw(NOBODY))?;
    let both = [Device::by_name(first)?, Device::by_name(subject.name)?];
    let mut skipped = Vec::new();
    let context = Context::open_first_of(both.clone(), |device, error| {
        skipped.push((device.name().to_owned(), error.errno(), error.message().to_owned()));
    })?;
    assert_eq!((context.device(), skipped.len()), (&both[1], 1));
    let (name, errno, message) = &skipped[0];
    assert_eq!((name, *errno), (first, Errno::NOENT), "{message}");
    assert!(message.contains("pass"), "{message}");
    assert_eq!(Context::open_first()?.device(), &both[1]);
    // On InfiniBand there are no IP addresses to connect by.
    if link_of(&context)?.layer != LinkLayer::ETHERNET {
        return Ok(());
    }
    // The kernel's routes lead to a device that this pod has.
    let own = SocketAddr::new(context.default_gid(link_of(&context)?.port)?.gid.ip(), 0);
    let (channel, service, param) = (channel()?, Service::at(&both[1], own)?, ConnectParam::new());
    let asked = ask_by(route_from(&channel, own, service.at)?, &param)?;
    let mut pair = accepted(asked, service.request()?, &param)?;
    send(&mut pair.active.0, &mut pair.passive.0)
}

fn container_that_is_shown_one_device_alone_lists_and_opens_it() -> Verdict {
    env::lab()?;
    start("alone", &env::second()?, &[])
}

/// As in a container with one node and without netlink, whose sysfs shows no other device.
fn alone(subject: &Subject<'_>) -> Verdict {
    const WHOLE: &str = "/tmp/uvt-sys";
    let shown = [
        format!("/sys/class/infiniband/{}", subject.name),
        format!("/sys/class/infiniband_verbs/{}", subject.node),
    ];
    let mut sources = Vec::new();
    for link in &shown {
        let inside = std::fs::canonicalize(link)?.strip_prefix("/sys")?.to_owned();
        sources.push(std::path::Path::new(WHOLE).join(inside));
    }
    std::fs::create_dir_all(WHOLE)?;
    mount("--bind /sys", WHOLE)?;
    hide_sysfs()?;
    for (source, link) in sources.iter().zip(&shown) {
        std::fs::create_dir_all(link)?;
        mount(&format!("--bind {}", source.display()), link)?;
    }
    let status = Command::new("umount").arg(WHOLE).status()?;
    assert!(status.success() && std::fs::read_dir(WHOLE)?.next().is_none());
    hide_nodes()?;
    make_node(&format!("/dev/infiniband/{}", subject.node), subject.number, 0o666)?;
    forbid_netlink()?;
    setrlimit(Resource::RLIMIT_MEMLOCK, MEMLOCK, MEMLOCK)?;
    rustix::thread::set_thread_uid(Uid::from_raw(NOBODY))?;

    let all = uverbs::devices()?;
    let [device] = &all[..] else { return Err(Stop::fail(format!("not one device: {all:?}"))) };
    assert_eq!((device.name(), device.driver()), (subject.name, Some(subject.driver)));
    assert!(device.is_described());
    let context = Context::open_first()?;
    assert_eq!(context.device(), device);
    let mut pair = Pair::on(context.clone(), context, Config::rc())?;
    pair.connect()?;
    pair.message(1, 5000)
}

fn file_that_a_supervisor_passes_is_enough() -> Verdict {
    env::lab()?;
    start("supervised", &env::device(), &[])
}

/// As in a service that may open no node, and gets the open file over a socket.
fn supervised(subject: &Subject<'_>) -> Verdict {
    let (supervisor, service) = UnixStream::pair()?;
    let path = format!("/dev/infiniband/{}", subject.node);
    let node = std::fs::File::options().read(true).write(true).open(path)?;
    passing::send_files(&supervisor, b"device", &[node.as_fd()])?;
    drop((supervisor, node));
    hide_nodes()?;
    hide_sysfs()?;
    forbid_netlink()?;
    setrlimit(Resource::RLIMIT_MEMLOCK, MEMLOCK, MEMLOCK)?;
    rustix::thread::set_thread_uid(Uid::from_raw(NOBODY))?;
    assert_eq!(uverbs::devices()?, []);

    let mut files = passing::receive_files(&service, &mut [0; 6])?.files;
    let file = files.pop().ok_or_else(|| Stop::fail("no file came"))?;
    let context = Context::from_fd(file)?;
    assert_eq!(context.device().driver(), Some(subject.driver));
    assert_eq!(context.device().port_count(), subject.ports);
    let mut pair = Pair::on(context.clone(), context, Config::rc())?;
    pair.connect()?;
    pair.message(1, 5000)
}

fn gid_of_another_network_namespace_is_not_chosen() -> Verdict {
    env::lab()?;
    start("elsewhere", &env::device(), &[])
}

/// As in a container with a network of its own, on a machine whose namespaces share the devices.
fn elsewhere(subject: &Subject<'_>) -> Verdict {
    let context = Context::open(&Device::by_name(subject.name)?)?;
    if context.query_port(env::port())?.link_layer != LinkLayer::ETHERNET {
        return Ok(());
    }
    let there = context.default_gid(env::port())?;
    assert!(context.gid_table()?.contains(&there));
    unshare(CloneFlags::CLONE_NEWNET)?;
    // The kernel still shows the GID.
    assert!(context.gid_table()?.contains(&there));
    // Without netlink the library binds sockets, which the filter on x86 forbids, too.
    let ways = if cfg!(target_arch = "x86") { &[true][..] } else { &[true, false] };
    for netlink in ways {
        if !netlink {
            forbid_netlink()?;
        }
        let error = context.default_gid(env::port()).unwrap_err();
        assert_eq!(error.errno(), Errno::NODATA, "{error}");
        let address = there.gid.ip().to_string();
        assert!(error.message().contains(&address), "{error}");
        assert!(error.message().contains("interfaces elsewhere"), "{error}");
    }
    Ok(())
}

fn root_of_a_user_namespace_works_within_the_limits_of_its_user() -> Verdict {
    env::lab()?;
    start("unprivileged", &env::device(), &[])
}

/// As in a container that a user started: root of a user namespace, and without privileges outside of it.
fn unprivileged(subject: &Subject<'_>) -> Verdict {
    setrlimit(Resource::RLIMIT_MEMLOCK, MEMLOCK, MEMLOCK)?;
    rustix::thread::set_thread_gid(Gid::from_raw(NOBODY))?;
    rustix::thread::set_thread_uid(Uid::from_raw(NOBODY))?;
    // Otherwise a process that changed its user does not own its files in /proc.
    set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    unshare(CloneFlags::CLONE_NEWUSER)?;
    let map = format!("0 {NOBODY} 1");
    for (file, text) in [("uid_map", map.as_str()), ("setgroups", "deny"), ("gid_map", &map)] {
        std::fs::write(format!("/proc/self/{file}"), text)?;
    }
    assert!(rustix::process::geteuid().is_root());

    let context = Context::open(&Device::by_name(subject.name)?)?;
    let mut pair = Pair::on(context.clone(), context.clone(), Config::rc())?;
    pair.connect()?;
    pair.message(1, 5000)?;
    // Capabilities of the namespace do not count for the device, which belongs to the machine.
    let pd = context.alloc_pd()?;
    let error = pd
        .mr_builder()
        .access(Access::ALL_REMOTE)
        .allocate::<u8>(2 * MEMLOCK as usize)
        .unwrap_err();
    assert_eq!(error.errno(), Errno::NOMEM, "{error}");
    for part in [format!("lock {} MiB", MEMLOCK >> 20).as_str(), "CAP_IPC_LOCK", "user namespace"] {
        assert!(error.message().contains(part), "{part}: {error}");
    }
    let cq = context.cq_builder(4).build()?;
    let error = pd.qp_builder(&cq, &cq, QpType::RAW_PACKET).build().unwrap_err();
    let (errno, part) = match subject.driver {
        DriverId::RXE => (Errno::OPNOTSUPP, "no queue pairs of type raw packet"),
        _ => (Errno::PERM, "CAP_NET_RAW"),
    };
    assert_eq!(error.errno(), errno, "{error}");
    assert!(error.message().contains(part), "{error}");
    let error = link::add_link("uvt_rxe", "rxe", "lo").unwrap_err();
    assert_eq!(error.errno(), Errno::PERM, "{error}");
    Ok(())
}

fn node_of_another_device_under_the_name_is_refused() -> Verdict {
    env::lab()?;
    let number = env::second()?.device_number().expect("it has a node");
    let number = [number.major, number.minor].map(|number| number.to_string());
    start("stale", &env::device(), &[&number[0], &number[1]])
}

/// As in a container that kept old nodes: the numbers belong to another device now.
fn stale(subject: &Subject<'_>) -> Verdict {
    let [major, minor] = subject.more else {
        return Err(Stop::fail("no second device was named"));
    };
    let device = Device::by_name(subject.name)?;
    hide_nodes()?;
    let path = format!("/dev/infiniband/{}", subject.node);
    make_node(&path, (major.parse()?, minor.parse()?), 0o666)?;
    let error = Context::open(&device).unwrap_err();
    assert_eq!(error.errno(), Errno::NODEV, "{error}");
    for part in [path.as_str(), "remove the stale node"] {
        assert!(error.message().contains(part), "{part}: {error}");
    }
    Ok(())
}

fn node_without_a_device_is_refused() -> Verdict {
    env::lab()?;
    start("ghost", &env::device(), &[])
}

fn ghost(subject: &Subject<'_>) -> Verdict {
    const PATH: &str = "/dev/infiniband/ghost";
    let free = (subject.number.1..)
        .find(|minor| devices_with((subject.number.0, *minor)).is_ok_and(|found| !found))
        .expect("numbers do not end");
    hide_nodes()?;
    make_node(PATH, (subject.number.0, free), 0o666)?;
    let error = Device::by_path(PATH).unwrap_err();
    assert_eq!(error.errno(), Errno::NXIO, "{error}");
    for part in [PATH, "list the devices afresh"] {
        assert!(error.message().contains(part), "{part}: {error}");
    }
    Ok(())
}

/// Whether a listed device has this number.
fn devices_with((major, minor): (u32, u32)) -> Verdict<bool> {
    let numbers = uverbs::devices()?;
    let mut numbers = numbers.iter().filter_map(Device::device_number);
    Ok(numbers.any(|number| (number.major, number.minor) == (major, minor)))
}

fn open_files_beyond_the_limit_are_refused() -> Verdict {
    env::lab()?;
    start("files", &env::device(), &[])
}

fn files(subject: &Subject<'_>) -> Verdict {
    let device = Device::by_name(subject.name)?;
    // Standard input, output and error are open.
    setrlimit(Resource::RLIMIT_NOFILE, 3, 3)?;
    let error = Context::open(&device).unwrap_err();
    assert_eq!(error.errno(), Errno::MFILE, "{error}");
    assert!(error.message().contains("RLIMIT_NOFILE"), "{error}");
    Ok(())
}

fn kernel_that_wipes_no_page_in_children_is_refused() -> Verdict {
    env::lab()?;
    start("ancient", &env::device(), &[])
}

/// As on Linux before 4.14.
fn ancient(subject: &Subject<'_>) -> Verdict {
    forbid_wiping_in_children()?;
    let error = Context::open(&Device::by_name(subject.name)?).unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    assert!(error.message().contains("4.14"), "{error}");
    Ok(())
}

fn huge_pages_that_children_would_get_are_refused_where_the_kernel_does_not_copy_them() -> Verdict {
    env::lab()?;
    let reserved = env::free_huge_pages()? > 0;
    require(reserved, Capability::HugePages, "none are set aside")?;
    start("huge", &env::device(), &[])
}

fn huge(subject: &Subject<'_>) -> Verdict {
    let pd = Context::open(&Device::by_name(subject.name)?)?.alloc_pd()?;
    let copies = uverbs::device::system()?.copy_on_fork;
    forbid_keeping_from_children()?;
    let pool = pd.buffer_pool_builder(4096).count(4).huge_pages().build();
    if copies {
        // Linux 5.12 and later: no pages are kept from children.
        pool?;
        return Ok(());
    }
    let error = pool.unwrap_err();
    assert_eq!(error.errno(), Errno::INVAL, "{error}");
    assert!(error.to_string().contains("Linux 5.12"), "{error}");
    Ok(())
}
