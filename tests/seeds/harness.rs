//! The fabric of a run, its faults, and the checks afterwards.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;
use tokio::task::{JoinHandle, yield_now};
use tokio::time::{sleep, timeout};
use uverbs::aio::cm::AsyncEventChannel;
use uverbs::device::devices_on;
use uverbs::sim::{CqeError, Fabric, Network, Profile, Rates, Side, TokioClock, Verb};
use uverbs::{Context, Errno, Handshake, QpControl};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The longest that a program may take, in virtual time: longer than all its own timeouts together.
const DEADLINE: Duration = Duration::from_secs(60 * 60);
/// The longest time until tasks have dropped their objects.
const CLEANING: Duration = Duration::from_secs(2 * 60 * 60);

/// Choices of a seed: SplitMix64, independent of the fabric's decisions.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(seed ^ 0x5eed_5eed_5eed_5eed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// True in `percent` of all cases.
    pub(crate) fn happens(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// Dice for another task.
    pub(crate) fn fork(&mut self) -> Dice {
        Dice(self.next())
    }
}

/// A fault of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// The link is down for some milliseconds.
    Flap,
    /// The sides do not reach each other for some milliseconds.
    Partition,
    /// Nothing of this side arrives at the other for some milliseconds.
    CutOff,
    RefuseReceives,
    LoseMessages,
    LateEvents,
    /// The process on this side dies.
    Kill,
    Unplug,
    /// The device has an internal error.
    Fail,
    FailCall(Verb),
    FailRequest,
}

const VERBS: [Verb; 9] = [
    Verb::OpenDevice,
    Verb::AllocPd,
    Verb::RegMr,
    Verb::CreateCompChannel,
    Verb::CreateCq,
    Verb::CreateQp,
    Verb::ModifyQp,
    Verb::QueryQp,
    Verb::CreateSrq,
];

impl Fault {
    fn choose(dice: &mut Dice) -> Fault {
        let verb = dice.pick(&VERBS);
        let harmful = [
            Fault::Kill,
            Fault::Unplug,
            Fault::Fail,
            Fault::FailCall(verb),
            Fault::FailCall(Verb::RegMr),
            Fault::FailRequest,
        ];
        let harmless = [
            Fault::None,
            Fault::Flap,
            Fault::Partition,
            Fault::CutOff,
            Fault::RefuseReceives,
            Fault::LoseMessages,
            Fault::LateEvents,
        ];
        if dice.happens(50) { dice.pick(&harmless) } else { dice.pick(&harmful) }
    }

    /// Whether a reliable connection survives the fault.
    pub(crate) fn is_harmless(self) -> bool {
        match self {
            Fault::None
            | Fault::Flap
            | Fault::Partition
            | Fault::CutOff
            | Fault::RefuseReceives
            | Fault::LoseMessages
            | Fault::LateEvents => true,
            Fault::Kill | Fault::Unplug | Fault::Fail | Fault::FailCall(_) | Fault::FailRequest => {
                false
            }
        }
    }
}

/// Both sides, by the names of their devices.
pub(crate) const NAMES: [&str; 2] = ["left", "right"];

/// The objects that a process has open. A fault may kill it.
#[derive(Default)]
struct Process {
    context: Option<Context>,
    channel: Option<AsyncEventChannel>,
}

/// A fabric with two devices, and its fault.
#[derive(Clone)]
pub(crate) struct Stage {
    pub(crate) fabric: Fabric,
    pub(crate) fault: Fault,
    /// The side of the fault.
    pub(crate) side: usize,
    /// The number of the call or request that fails.
    nth: u32,
    processes: Arc<Mutex<[Process; 2]>>,
    tasks: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

/// The result of a run. Two runs of a seed have the same.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) fault: Fault,
    pub(crate) decisions: u64,
    pub(crate) history: String,
    /// The bytes in memory at the end.
    pub(crate) memory: Vec<u8>,
}

impl Record {
    pub(crate) fn compare(&self, other: &Record) -> Result<()> {
        if self == other {
            return Ok(());
        }
        let mut lines = self.history.lines().zip(other.history.lines());
        let differing = match lines.find(|(one, two)| one != two) {
            Some((one, two)) => format!("\n{one}\n{two}"),
            None => format!("\n{:?}\n{:?}", self.memory, other.memory),
        };
        Err(format!(
            "two runs differ: {} and {} decisions{differing}",
            self.decisions, other.decisions
        )
        .into())
    }
}

impl Stage {
    pub(crate) fn new(dice: &mut Dice, seed: u64) -> Result<Stage> {
        let mut rates = Rates::none();
        if dice.happens(60) {
            rates = rates
                .loss(dice.below(5) as f64 / 100.0)
                .delay(dice.below(30) as f64 / 100.0, Duration::from_micros(1 + dice.below(5000)))
                .late_events(dice.below(50) as f64 / 100.0);
        }
        let builder = NAMES
            .iter()
            .fold(Fabric::builder(), |builder, name| builder.device(Profile::new().name(*name)));
        let builder = builder.stepped(seed).rates(rates).network(Network::of_seed(dice.next()));
        let fabric = builder.writes_in_any_order().history().build()?;
        let fault = Fault::choose(dice);
        let (side, nth) = (dice.below(2) as usize, dice.below(6) as u32);
        let stage =
            Stage { fabric, fault, side, nth, processes: Arc::default(), tasks: Arc::default() };
        if let Fault::FailCall(_) = fault {
            stage.strike();
        }
        Ok(stage)
    }

    pub(crate) fn open(&self, side: usize) -> Result<Context> {
        let devices = devices_on(&self.fabric.system());
        let device = devices.iter().find(|device| device.name() == NAMES[side]);
        let context = Context::open(device.ok_or("the device is unplugged")?)?;
        self.process(side, |process| process.context = Some(context.clone()));
        Ok(context)
    }

    /// The event channel of a side whose context is open.
    pub(crate) fn channel(&self, side: usize, context: &Context) -> Result<AsyncEventChannel> {
        let (channel, driver) = AsyncEventChannel::spawn_on(&self.fabric.system())?;
        self.watch(driver);
        channel.use_context(context)?;
        self.process(side, |process| process.channel = Some(channel.clone()));
        Ok(channel)
    }

    fn process(&self, side: usize, change: impl FnOnce(&mut Process)) {
        change(&mut self.processes.lock().unwrap_or_else(PoisonError::into_inner)[side]);
    }

    /// Spawns a task, which has to end by itself.
    pub(crate) fn spawn<F: Future<Output = ()> + Send + 'static>(&self, task: F) {
        self.keep(tokio::spawn(task));
    }

    /// A driver of the library, which has to end, too.
    pub(crate) fn watch(&self, driver: JoinHandle<uverbs::Result<()>>) {
        self.spawn(async move {
            match driver.await {
                Ok(_) => {}
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        });
    }

    fn keep(&self, task: JoinHandle<()>) {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(task);
    }

    /// Causes the fault that the seed chose.
    pub(crate) fn strike(&self) {
        let Some(device) = self.fabric.device(NAMES[self.side]) else { return };
        let process = || {
            let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut processes[self.side])
        };
        match self.fault {
            Fault::None => {}
            Fault::Flap => device.set_link(false),
            Fault::Partition => self.fabric.partition([&device]),
            Fault::CutOff => {
                let other = self.fabric.device(NAMES[1 - self.side]);
                other.iter().for_each(|other| device.cut_off(other));
            }
            Fault::RefuseReceives => device.refuse_receives(3),
            Fault::LoseMessages => device.lose_messages(3),
            Fault::LateEvents => device.delay_events(4, Duration::from_millis(3)),
            Fault::Kill => {
                let Process { context, channel } = process();
                context.iter().for_each(|context| assert!(self.fabric.kill(context)));
                channel.iter().for_each(|channel| assert!(self.fabric.kill(channel.channel())));
            }
            Fault::Unplug => device.unplug(),
            Fault::Fail => device.fail(),
            Fault::FailCall(verb) => device.fail_call(verb, self.nth, Errno::NOMEM),
            Fault::FailRequest => {
                // `MLX5_CQE_SYNDROME_LOCAL_PROT_ERR`
                let error = CqeError { syndrome: 4, vendor: 0 };
                device.fail_request(None, Side::Send, self.nth, error);
            }
        }
    }

    /// Drops the objects that were kept for a fault.
    pub(crate) fn end(&self) {
        self.relieve();
        *self.processes.lock().unwrap_or_else(PoisonError::into_inner) = Default::default();
    }

    /// Ends a temporary fault.
    pub(crate) fn relieve(&self) {
        match (self.fault, self.fabric.device(NAMES[self.side])) {
            (Fault::Flap, Some(device)) => device.set_link(true),
            (Fault::Partition | Fault::CutOff, _) => self.fabric.heal(),
            _ => {}
        }
    }

    /// Strikes after some turns of the event loop.
    async fn sabotage(self, mut dice: Dice) {
        if matches!(self.fault, Fault::FailCall(_)) {
            return;
        }
        if dice.happens(30) {
            sleep(Duration::from_millis(dice.below(60))).await;
        }
        let most = dice.pick(&[10, 100, 1000]);
        for _ in 0..dice.below(most) {
            yield_now().await;
        }
        self.strike();
        sleep(Duration::from_millis(1 + dice.below(40))).await;
        self.relieve();
    }

    pub(crate) fn record(&self, memory: Vec<u8>) -> Record {
        let (history, decisions) = (self.fabric.history(), self.fabric.decisions());
        Record { fault: self.fault, decisions, history, memory }
    }
}

/// Fails if an object is left on a device.
pub(crate) fn check_objects(fabric: &Fabric) -> Result<()> {
    for device in devices_on(&fabric.system()) {
        let counts = device.resources()?.to_string();
        if counts.split_whitespace().any(|word| word.parse::<u64>().is_ok_and(|count| count > 0)) {
            return Err(format!("objects are left on {}: {counts}", device.name()).into());
        }
    }
    Ok(())
}

/// Connects a client to its server, which is the first to be ready.
pub(crate) fn connect(client: &QpControl, server: &QpControl) -> uverbs::Result<()> {
    connect_with(client, server, &Handshake::new())
}

pub(crate) fn connect_with(
    client: &QpControl,
    server: &QpControl,
    options: &Handshake,
) -> uverbs::Result<()> {
    let here = client.endpoint(&client.context().query_gid(1, 3)?)?;
    let there = server.endpoint(&server.context().query_gid(1, 3)?)?;
    server.handshake(&here, options)?;
    client.handshake(&there, options)
}

/// Runs a program in tokio's event loop with a paused clock. A program asserts its promises in every case; it returns
/// an error only if the fault broke its connection.
pub(crate) fn play<F: Future<Output = Result<Vec<u8>>>>(
    seed: u64,
    program: impl FnOnce(Stage, Dice) -> F,
) -> Result<Record> {
    let mut dice = Dice::new(seed);
    let stage = Stage::new(&mut dice, seed)?;
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().start_paused(true).build()?;
    let fabric = stage.fabric.clone();
    runtime.spawn(async move { fabric.drive(TokioClock::new()).await });
    let end: Result<Vec<u8>> = runtime.block_on(async {
        let saboteur = tokio::spawn(stage.clone().sabotage(dice.fork()));
        let end = timeout(DEADLINE, program(stage.clone(), dice.fork())).await;
        saboteur.abort();
        let _ = saboteur.await;
        stage.end();
        sleep(CLEANING).await;
        let tasks =
            std::mem::take(&mut *stage.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        let waiting = tasks.iter().filter(|task| !task.is_finished()).count();
        for task in tasks.into_iter().filter(JoinHandle::is_finished) {
            if let Err(error) = task.await {
                std::panic::resume_unwind(error.into_panic());
            }
        }
        match end {
            Err(_) => Err(format!("{:?}: the program waits for ever", stage.fault).into()),
            Ok(_) if waiting > 0 => {
                Err(format!("{:?}: {waiting} tasks wait for ever", stage.fault).into())
            }
            Ok(end) => end.map_or_else(
                |error| match stage.fault.is_harmless() {
                    true => Err(format!("{:?} ends the program: {error}", stage.fault).into()),
                    false => Ok(error.to_string().into_bytes()),
                },
                Ok,
            ),
        }
    });
    let objects = check_objects(&stage.fabric);
    drop(runtime);
    let memory = end?;
    objects.map_err(|error| format!("{:?}: {error}", stage.fault))?;
    Ok(stage.record(memory))
}

/// The time at which a future is given up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GivingUp {
    polls: u64,
    /// Whether this is at the last of its polls, or when it is woken once more.
    at_once: bool,
}

impl GivingUp {
    pub(crate) fn choose(dice: &mut Dice) -> GivingUp {
        GivingUp { polls: dice.below(4), at_once: dice.happens(50) }
    }
}

/// Polls a future this number of times, and drops it.
pub(crate) async fn polls<F: Future + Unpin>(
    future: &mut F,
    GivingUp { mut polls, at_once }: GivingUp,
) -> Option<F::Output> {
    poll_fn(|cx| {
        if polls == 0 {
            return Poll::Ready(None);
        }
        polls -= 1;
        match Pin::new(&mut *future).poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polls == 0 && at_once => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
