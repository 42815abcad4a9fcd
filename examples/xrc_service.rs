//! One connection that reaches the queues of two processes, by XRC. Two workers open the XRC domain of one file, each
//! with a shared receive queue of its own, and the first also has the target of the connection. Each message of the
//! client names the queue that receives it. Of n processes on one machine and m on another, each of the n needs m
//! connections this way, and not n times m.
//!
//! This process is the client and starts the workers: the same program once more.

use std::fs::File;
use std::io::{BufRead, BufReader, Write, stdin};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, process};
use uverbs::{CompletionQueue, Context, Endpoint, Handshake, QpType, RecvWr, SendWr, SrqNumber};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const PATIENCE: Duration = Duration::from_secs(20);
/// The longest message.
const SIZE: usize = 64;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ended = match arguments[..] {
        [] => client(),
        ["worker", path] => worker(Path::new(path), false),
        ["worker", path, "target"] => worker(Path::new(path), true),
        _ => Err("xrc_service takes no arguments".into()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn open() -> Result<Context> {
    Ok(Context::open_first()?)
}

/// A worker, which talks to this process in lines.
struct Worker {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Worker {
    fn start(path: &Path, role: Option<&str>) -> Result<Worker> {
        let mut child = Command::new(env::current_exe()?)
            .arg("worker")
            .arg(path)
            .args(role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let to = child.stdin.take().ok_or("the worker has no input")?;
        let from = BufReader::new(child.stdout.take().ok_or("the worker has no output")?);
        Ok(Worker { child, to, from })
    }

    /// The rest of the next line, which has to begin with `word`.
    fn expect(&mut self, word: &str) -> Result<String> {
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        let rest = line.trim_end().strip_prefix(word).and_then(|rest| rest.strip_prefix(' '));
        Ok(rest.ok_or_else(|| format!("the worker said {line:?} in place of {word:?}"))?.to_owned())
    }

    /// Tells the worker to end, and waits for it.
    fn dismiss(mut self) -> Result<()> {
        drop(self.to);
        match self.child.wait()?.success() {
            true => Ok(()),
            false => Err("a worker failed".into()),
        }
    }
}

fn client() -> Result<()> {
    let context = open()?;
    // Before workers are started, so that a device without XRC is reported once.
    drop(context.xrcd_builder().build()?);
    // Every process that may open the file may use the domain. The contents of the file do not matter.
    let path = env::temp_dir().join(format!("uverbs-xrc-{}", process::id()));
    File::create_new(&path)?;
    let served = serve(&context, &path);
    fs::remove_file(&path)?;
    served
}

fn serve(context: &Context, path: &Path) -> Result<()> {
    let mut first = Worker::start(path, Some("target"))?;
    let queue: SrqNumber = SrqNumber(first.expect("queue")?.parse()?);
    let mut second = Worker::start(path, None)?;
    let other: SrqNumber = SrqNumber(second.expect("queue")?.parse()?);

    let pd = context.alloc_pd()?;
    let mut cq = context.cq_builder(4).build()?;
    let builder = pd.qp_builder(&cq, &cq, QpType::XRC_INI).max_send_wr(2);
    let mut initiator = builder.max_inline_data(SIZE as u32).build()?;
    let endpoint = initiator.endpoint(&context.default_gid(1)?)?;
    let target = endpoint_of(&first.expect("endpoint")?)?;
    writeln!(first.to, "{}", hex(&endpoint.to_bytes()))?;
    initiator.handshake(&target, &Handshake::new())?;
    first.expect("connected as")?;

    for (queue, text) in [(queue, "to the first"), (other, "to the second")] {
        let mut batch = initiator.send_batch()?;
        batch.push(SendWr::send(&[]).inline(text.as_bytes()).signaled().to_srq(queue))?;
        // SAFETY: the data is inline, and so the request names no memory.
        unsafe { batch.ring() }?;
        wait(&mut cq)?;
    }
    println!("the first worker received {:?}", first.expect("received")?);
    println!("the second worker received {:?}", second.expect("received")?);
    second.dismiss()?;
    first.dismiss()
}

/// Makes a queue in the file's domain, and with `has_target` the target of the connection, too.
fn worker(path: &Path, has_target: bool) -> Result<()> {
    let context = open()?;
    let domain = context.xrcd_builder().file(&File::open(path)?).create().build()?;
    let pd = context.alloc_pd()?;
    let mut cq = context.cq_builder(4).build()?;
    let mut srq = pd.srq_builder(4).xrc(&domain, &cq).build()?;
    let memory = pd.mr_builder().allocate::<u8>(SIZE)?;
    let sges = [memory.sge(..)?];
    let mut batch = srq.batch()?;
    batch.push(RecvWr::new(&sges))?;
    // SAFETY: the region is dropped after the queue, and no code borrows its memory.
    unsafe { batch.ring()? };
    println!("queue {}", srq.number().ok_or("the queue is of an XRC domain")?.0);

    let target = if has_target { Some(domain.create_target()?) } else { None };
    if let Some(target) = &target {
        let endpoint = target.endpoint(&context.default_gid(1)?)?;
        println!("endpoint {}", hex(&endpoint.to_bytes()));
        let mut line = String::new();
        stdin().read_line(&mut line)?;
        target.handshake(&endpoint_of(line.trim_end())?, &Handshake::new())?;
        println!("connected as {}", target.qpn().0);
    }
    let length = wait(&mut cq)?;
    let mut bytes = [0; SIZE];
    memory.copy_to(0, &mut bytes)?;
    println!("received {}", String::from_utf8_lossy(&bytes[..length]));
    // The target carries the messages of the other worker, too.
    stdin().read_line(&mut String::new())?;
    drop(target);
    Ok(())
}

/// Waits for a completion, and returns its bytes.
fn wait(cq: &mut CompletionQueue) -> Result<usize> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(completion) = cq.poll()?.next() {
            completion.ok()?;
            return Ok(completion.byte_len() as usize);
        }
        std::thread::yield_now();
    }
    Err("no completion came within 20 s".into())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn endpoint_of(text: &str) -> Result<Endpoint> {
    let mut bytes = [0; Endpoint::BYTES];
    if text.len() != 2 * bytes.len() {
        return Err(format!("an endpoint of {} characters", text.len()).into());
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16)?;
    }
    Ok(Endpoint::from_bytes(&bytes).ok_or("the other side's endpoint is none")?)
}
