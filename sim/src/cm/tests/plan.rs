//! Programs at both ends that connect, answer late, reject, disconnect, leave and are killed, at random.

use super::super::connection::Report;
use super::super::connections::Connections;
use super::super::message::{Body, Gid, Message, Service, Transport};
use super::{A, B, SERVICE, bytes, message, new_table, side};
use std::collections::{BTreeMap, BTreeSet};
use uverbs_roce::cm::MAD;

const SEEDS: u64 = 1_000;
const SECOND: u64 = 1_000_000_000;
/// Connections and queries of a run, from either end.
const REQUESTS: u64 = 12;
/// The time in which all ends, however late the answers are: 16 messages, each after as long as a peer may ask for.
const PATIENCE: u64 = 3600 * SECOND;

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 ^ self.0 >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        (mixed ^ mixed >> 33) % limit
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Connect,
    Query,
    Answer,
    Confirm,
    Disconnect,
    Leave,
    Die,
}

/// A connection or a query, as a program sees it.
#[derive(Clone, Debug, Default)]
struct Seen {
    active: bool,
    is_query: bool,
    /// Response, rejection, or that nobody is there.
    answers: u32,
    rejected: bool,
    unreachable: bool,
    confirmed: bool,
    established: u32,
    disconnected: u32,
    /// Whether this side ended it before it was established.
    gave_up: bool,
}

struct End {
    at: Gid,
    table: Connections,
    seen: BTreeMap<u32, Seen>,
}

struct Run {
    seed: u64,
    dice: Dice,
    now: u64,
    ends: [End; 2],
    /// MADs under way, to the end with this number.
    network: BTreeMap<(u64, u64), (usize, [u8; MAD])>,
    actions: BTreeMap<(u64, u64), (usize, u32, Action)>,
    order: u64,
    /// The network loses and doubles one of so many; 0 for none.
    faults: u64,
    kills: bool,
}

impl Run {
    fn new(seed: u64) -> Run {
        let end = |at, last| End { at, table: new_table(last), seen: BTreeMap::new() };
        let mut dice = Dice(seed);
        let starts = [dice.below(1 << 32) as u32, dice.below(1 << 32) as u32];
        let ends = [end(A, starts[0]), end(B, starts[1])];
        let faults = [0, 2, 3, 10][seed as usize % 4];
        let kills = dice.one_in(3);
        let mut run = Run {
            seed,
            dice,
            now: 0,
            ends,
            network: BTreeMap::new(),
            actions: BTreeMap::new(),
            order: 0,
            faults,
            kills,
        };
        for _ in 0..REQUESTS {
            let action = if run.dice.one_in(4) { Action::Query } else { Action::Connect };
            let end = run.dice.below(2) as usize;
            run.plan(10 * SECOND, end, 0, action);
        }
        if kills {
            let end = run.dice.below(2) as usize;
            run.plan(20 * SECOND, end, 0, Action::Die);
        }
        run
    }

    /// Has a program do something within some time.
    fn plan(&mut self, within: u64, end: usize, number: u32, action: Action) {
        let due = self.now + self.dice.below(within);
        self.order += 1;
        self.actions.insert((due, self.order), (end, number, action));
    }

    fn act(&mut self, end: usize, number: u32, action: Action) {
        let (ends, now) = ((self.ends[end].at, self.ends[1 - end].at), self.now);
        let own_qpn = 1 + self.dice.below(1 << 20) as u32;
        let private = self.dice.below(256) as u8;
        let table = &mut self.ends[end].table;
        match action {
            Action::Connect | Action::Query => {
                let is_query = matches!(action, Action::Query);
                let number = match is_query {
                    true => {
                        let service = Service { space: 0x111, ..SERVICE };
                        table.query(now, ends, service, vec![private; 180])
                    }
                    false => {
                        let side = side(own_qpn, &[private; 56]);
                        table.connect(now, ends, Transport::Rc, SERVICE, side, (3, 0))
                    }
                };
                let seen = Seen { active: true, is_query, ..Seen::default() };
                self.ends[end].seen.insert(number, seen);
            }
            Action::Answer => {
                let is_query = self.ends[end].seen.get(&number).is_some_and(|seen| seen.is_query);
                let rejects = self.dice.one_in(3);
                let table = &mut self.ends[end].table;
                let done = match (rejects, is_query) {
                    (true, _) => table.reject(number, 28, vec![private; 136]),
                    (false, true) => {
                        table.answer(number, 0, side(own_qpn, b""), 1, vec![private; 136])
                    }
                    (false, false) => table.accept(now, number, side(own_qpn, &[private; 196])),
                };
                if rejects && done.is_some() {
                    self.ends[end].seen.entry(number).and_modify(|seen| seen.gave_up = true);
                }
            }
            Action::Confirm => {
                if table.confirm(number).is_some() {
                    let seen = self.ends[end].seen.entry(number);
                    seen.and_modify(|seen| seen.confirmed = true);
                    self.plan(30 * SECOND, end, number, Action::Disconnect);
                }
            }
            Action::Disconnect => drop(table.disconnect(now, number)),
            Action::Leave => {
                table.destroy(now, number);
                self.ends[end].seen.remove(&number);
            }
            Action::Die => {
                // Its connections and plans are gone; another process has its address.
                let last = self.dice.below(1 << 32) as u32;
                self.ends[end].table = new_table(last);
                self.ends[end].seen.clear();
                let of_other = |_: &(u64, u64), action: &mut (usize, u32, Action)| action.0 != end;
                self.actions.retain(of_other);
            }
        }
    }

    fn report(&mut self, end: usize, number: u32, report: Report) {
        let late = if self.dice.one_in(4) { 40 } else { 2 };
        match report {
            Report::Requested(message) => {
                let data = match &message.body {
                    Body::Req { side, .. } => &side.private_data,
                    Body::SidrReq { private_data, .. } => private_data,
                    other => panic!("seed {}: {other:?}", self.seed),
                };
                assert!(data.iter().all(|byte| *byte == data[0]), "seed {}", self.seed);
                let is_query = matches!(message.body, Body::SidrReq { .. });
                self.ends[end].seen.insert(number, Seen { is_query, ..Seen::default() });
                self.plan(late * SECOND, end, number, Action::Answer);
                return;
            }
            report => {
                let Some(seen) = self.ends[end].seen.get_mut(&number) else { return };
                let established = matches!(report, Report::Established);
                match report {
                    Report::Response(_) => seen.answers += 1,
                    Report::Answered(_) => seen.answers += 1,
                    Report::Rejected { .. } => {
                        seen.answers += 1;
                        seen.rejected = true;
                        // Behind a response the peer has changed its mind.
                        seen.answers = seen.answers.min(1);
                    }
                    Report::Unreachable => {
                        seen.answers += 1;
                        seen.unreachable = true;
                    }
                    Report::Established => seen.established += 1,
                    Report::Disconnected => seen.disconnected += 1,
                    Report::TimeWaitExit => {}
                    Report::Requested(_) => unreachable!(),
                }
                if established {
                    // Its peer may have died.
                    self.plan(60 * SECOND, end, number, Action::Disconnect);
                }
                if !matches!(report, Report::Response(_)) {
                    return;
                }
            }
        }
        let next = if self.dice.one_in(8) { Action::Leave } else { Action::Confirm };
        self.plan(late * SECOND, end, number, next);
    }

    /// Sends the messages of both ends into the network, and hands the programs their events.
    fn settle(&mut self) {
        for end in 0..2 {
            while let Some(message) = self.ends[end].table.next_message() {
                self.send(end, &message);
            }
            while let Some((number, report)) = self.ends[end].table.next_report() {
                self.report(end, number, report);
            }
        }
    }

    fn send(&mut self, from: usize, message: &Message) {
        let copies = match self.faults {
            0 => 1,
            faults if self.dice.one_in(faults) => 0,
            faults if self.dice.one_in(faults) => 2,
            _ => 1,
        };
        for _ in 0..copies {
            // Late ones come behind those that were sent again.
            let late = match self.faults {
                0 => 1_000,
                _ if self.dice.one_in(10) => 10 * SECOND,
                _ => SECOND / 100,
            };
            let due = self.now + 1 + self.dice.below(late);
            self.order += 1;
            self.network.insert((due, self.order), (1 - from, bytes(message)));
        }
    }

    fn next_time(&self) -> Option<u64> {
        let network = self.network.keys().next().map(|(due, _)| *due);
        let actions = self.actions.keys().next().map(|(due, _)| *due);
        let tables = self.ends.iter().filter_map(|end| end.table.deadline());
        tables.chain(network).chain(actions).min()
    }

    fn play(&mut self) {
        self.settle();
        while let Some(now) = self.next_time() {
            self.now = self.now.max(now);
            assert!(self.now < PATIENCE, "seed {} does not end", self.seed);
            while let Some(entry) = self.network.first_entry() {
                if entry.key().0 > self.now {
                    break;
                }
                let (to, bytes) = entry.remove();
                let ends = (self.ends[1 - to].at, self.ends[to].at);
                self.ends[to].table.receive(self.now, &message(&bytes, ends));
                self.settle();
            }
            while let Some(entry) = self.actions.first_entry() {
                if entry.key().0 > self.now {
                    break;
                }
                let (end, number, action) = entry.remove();
                self.act(end, number, action);
                self.settle();
            }
            for end in 0..2 {
                self.ends[end].table.run_timers(self.now);
            }
            self.settle();
        }
    }

    fn check(&mut self) {
        let seed = self.seed;
        let mut kinds = BTreeSet::new();
        for end in &self.ends {
            for seen in end.seen.values() {
                // A passive end may hear of the end before the confirmation.
                let connected = seen.established == 1 || seen.disconnected == 1;
                let over = seen.answers == 1 || !seen.active && (connected || seen.gave_up);
                let is_query = seen.is_query && !seen.active;
                assert!(over || is_query || seen.confirmed, "seed {seed}: {seen:?}");
                assert!(seen.answers <= 1 && seen.established <= 1, "seed {seed}: {seen:?}");
                // Each end that was established has ended once.
                let was = seen.confirmed || seen.established == 1;
                let ended = seen.disconnected == 1 || seen.disconnected == 0 && !was;
                assert!(
                    ended && (was || !seen.active || seen.disconnected == 0),
                    "seed {seed}: {seen:?}"
                );
                if self.faults == 0 && !self.kills {
                    assert!(!seen.unreachable, "seed {seed}: {seen:?}");
                }
                kinds.insert((seen.rejected, seen.unreachable, was));
            }
        }
        // Nothing is left when the programs have let go of what they have.
        for end in &mut self.ends {
            for number in std::mem::take(&mut end.seen).into_keys() {
                end.table.destroy(self.now, number);
            }
        }
        self.settle();
        self.play();
        for end in &self.ends {
            assert_eq!((end.table.len(), end.table.deadline()), ((0, 0), None), "seed {seed}");
        }
    }
}

#[test]
fn all_that_programs_ask_for_ends_whatever_the_network_does() {
    for seed in 1..=SEEDS {
        let mut run = Run::new(seed);
        run.play();
        run.check();
    }
}
