//! The switch: functions, and what travels between them.
//!
//! Pairs with the requester and responder of [`crate::data`]. Nothing is under way between calls: a
//! message is carried out at its destination while its sender waits.

use uverbs_uapi::mlx5::prm::qpc::qpc;

use crate::data::ethernet::Outgoing;
use crate::data::message::{Answer, Message};
use crate::data::send::{Next, Target};
use crate::device::Device;
use crate::fault::Fate;
use crate::function::Function;
use crate::options::{Options, PortType};
use crate::port::GIDS;

/// Requests that one queue may have carried out before another gets its turn.
const TURN: usize = 32;
/// What a turn may cost, in steps of about ten nanoseconds: then whoever is connected is heard, and the
/// rest goes on in the next one.
const TURN_COST: u64 = 1 << 20;
/// What a request costs whatever it does.
const REQUEST_COST: u64 = 64;

/// Functions behind one switch.
#[derive(Default)]
pub struct Fabric {
    functions: Vec<Function>,
    /// The function whose queues are looked at first, so that a turn that ends early does not
    /// always end before the same ones.
    first: usize,
    /// What the turn may still cost.
    left: u64,
}

impl Fabric {
    /// Adds a function with these options; its number is its place.
    pub fn add(&mut self, mut options: Options) -> usize {
        let number = self.functions.len();
        options.number = number as u32;
        self.functions.push(Function::new(options));
        number
    }

    /// How many functions there are.
    pub fn len(&self) -> usize {
        self.functions.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// The function with this number.
    ///
    /// # Panics
    /// If there is none.
    pub fn function(&mut self, number: usize) -> &mut Function {
        &mut self.functions[number]
    }

    /// Lets it be `now`, in nanoseconds: what a guest reads of the devices' clocks from here on.
    pub fn set_time(&mut self, now: u64) {
        for function in &mut self.functions {
            function.device_mut().now = now;
        }
    }

    /// Sets the time, in nanoseconds since the start, and does one turn of what is due. Returns
    /// whether there is more to do right away.
    pub fn turn(&mut self, now: u64) -> bool {
        self.set_time(now);
        for function in &mut self.functions {
            function.device_mut().run_timers();
        }
        self.left = TURN_COST;
        let (first, count) = (self.first, self.functions.len());
        for number in (0..count).map(|step| (first + step) % count) {
            if !self.functions[number].device().bus_master {
                continue;
            }
            for _ in 0..self.functions[number].device().awake.len() {
                let Some(queue) = self.functions[number].device_mut().awake.pop_front() else {
                    break;
                };
                self.run_queue(number, queue);
                if self.left == 0 {
                    self.first = (number + 1) % count;
                    return true;
                }
            }
        }
        let busy = |device: &Device| device.bus_master && !device.awake.is_empty();
        self.functions.iter().any(|function| busy(function.device()))
    }

    /// Notes what a request has cost; false if the turn ends with it.
    fn pay(&mut self) -> bool {
        let cost: u64 = self.functions.iter().map(|function| function.device().cost()).sum();
        self.left = self.left.saturating_sub(cost.saturating_add(REQUEST_COST));
        self.left > 0
    }

    /// When something is due next, in nanoseconds since the start.
    pub fn deadline(&self) -> Option<u64> {
        self.functions.iter().filter_map(|function| function.device().deadline()).min()
    }

    fn run_queue(&mut self, number: usize, queue: u32) {
        if self.functions[number].device().is_raw(queue) {
            return self.run_raw(number, queue);
        }
        for _ in 0..TURN {
            if !self.pay() {
                break;
            }
            match self.functions[number].device_mut().next_request(queue) {
                Next::Idle => return,
                Next::Done => {}
                Next::Carry(carry) => {
                    let (job, message, target) = *carry;
                    let sender = self.functions[number].device_mut();
                    let (fate, ready) = sender.faults.message(sender.now, queue);
                    ready.into_iter().for_each(|queue| sender.wake(queue));
                    if let Fate::Held(wait) = fate {
                        return sender.wake_after(queue, wait);
                    }
                    let answer = match fate {
                        Fate::Lost => Answer::Lost,
                        _ => self.carry(number, &message, target),
                    };
                    let sender = self.functions[number].device_mut();
                    // Who is told nothing waits for nothing.
                    let waits = matches!(answer, Answer::Lost | Answer::NotReady(_))
                        && sender.is_reliable(queue);
                    sender.finish(queue, &job, &message, answer);
                    if waits {
                        return;
                    }
                }
            }
        }
        self.functions[number].device_mut().wake(queue);
    }

    fn run_raw(&mut self, number: usize, queue: u32) {
        for _ in 0..TURN {
            if !self.pay() {
                break;
            }
            match self.functions[number].device_mut().next_frames(queue) {
                Outgoing::Idle => return,
                Outgoing::Done => {}
                Outgoing::Frames(frames, domain) => {
                    for frame in frames {
                        self.flood(number, &frame, domain);
                    }
                }
            }
        }
        self.functions[number].device_mut().wake(queue);
    }

    /// Brings a frame to every port; each takes what is for it.
    fn flood(&mut self, from: usize, frame: &[u8], domain: u32) {
        for to in 0..self.functions.len() {
            if self.reaches(from, to) {
                let own = (from == to).then_some(domain);
                self.functions[to].device_mut().receive_frame(frame, own);
            }
        }
    }

    /// Brings a message to where it is addressed.
    fn carry(&mut self, from: usize, message: &Message, target: Target) -> Answer {
        if let Target::Group(group) = target {
            let sender = self.functions[from].device();
            let deaf = sender
                .objects
                .qps
                .get(message.source_qpn)
                .is_ok_and(|qp| qp.context.is_set(qpc::block_lb_mc));
            for number in 0..self.functions.len() {
                if !self.reaches(from, number) {
                    continue;
                }
                let device = self.functions[number].device_mut();
                for qpn in device.objects.groups.members(&group) {
                    // A sender that is a member hears itself, unless it asked not to.
                    if deaf && number == from && qpn == message.source_qpn {
                        continue;
                    }
                    device.respond(&Message { qpn, ..message.clone() });
                }
            }
            return Answer::Acknowledged;
        }
        let is_target = |number: &usize| {
            let port = &self.functions[*number].device().port;
            self.reaches(from, *number)
                && match target {
                    Target::Lid(lid) => port.lid() == lid,
                    Target::Gid(gid) => (0..GIDS).any(|index| port.roce_gid(index) == Some(gid)),
                    Target::Group(_) => false,
                }
        };
        // A function's own address is its own even if another one claims it too.
        let to = std::iter::once(from).chain(0..self.functions.len()).find(is_target);
        match to {
            Some(to) => self.functions[to].device_mut().respond(message),
            None => Answer::Lost,
        }
    }

    /// Whether two ports can talk: both up and of one kind, or one and the same; and whether what is
    /// brought there can be put into memory.
    fn reaches(&self, from: usize, to: usize) -> bool {
        let (a, b) = (self.functions[from].device(), self.functions[to].device());
        let kind = |device: &Device| -> PortType { device.options.port_type };
        b.bus_master && (from == to || a.port.active() && b.port.active() && kind(a) == kind(b))
    }
}
