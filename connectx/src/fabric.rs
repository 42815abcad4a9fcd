//! The switch that connects functions.
//!
//! Pairs with the requester and responder of `data`. No message is in flight between calls: the
//! destination executes a message while its sender waits.

use uverbs_uapi::mlx5::prm::qpc::qpc;

use crate::data::message::{Answer, Message, Request, Response};
use crate::data::raw::NextFrames;
use crate::data::requester::{Destination, NextWqe};
use crate::device::Device;
use crate::fault::MessageFate;
use crate::function::Function;
use crate::options::{Options, PortType};

/// WQEs that one queue may execute before the next queue has its turn.
const WQES_PER_TURN: usize = 32;
/// The most that one poll may cost, in steps of about ten nanoseconds. After that the caller serves its
/// clients before it polls again.
const COST_PER_POLL: u64 = 1 << 20;
/// The cost of each WQE, in steps.
const WQE_COST: u64 = 64;

/// Functions behind one switch.
#[derive(Default)]
pub struct Fabric {
    functions: Vec<Function>,
    /// The function whose queues come first. It changes when a poll ends early, so that no queue
    /// waits for ever.
    first: usize,
    /// The cost that the current poll has left, in steps.
    budget: u64,
    /// Memory for the WQE, the data and the response of a request; empty while a request is executed.
    work: (Request, Answer),
}

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Whether anything was done: a WQE executed, a timer run.
    pub worked: bool,
    /// Whether there is more to do now: run again.
    pub more: bool,
    /// When the next timer is due, in nanoseconds since the start; none if only doorbells and commands
    /// bring new work.
    pub deadline: Option<u64>,
}

/// The number of queues of a function that have work and may be served.
fn ready(function: &Function) -> usize {
    let device = function.device();
    if device.bus_master { device.ready_queues.len() } else { 0 }
}

impl Fabric {
    /// Adds a function and returns its number.
    pub fn add(&mut self, mut options: Options) -> usize {
        let number = self.functions.len();
        options.number = number as u32;
        self.functions.push(Function::new(options));
        number
    }

    /// The number of functions.
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

    /// Sets the time in nanoseconds since the start, which guests read from the device's clock.
    pub fn set_time(&mut self, now: u64) {
        for function in &mut self.functions {
            function.device_mut().now = now;
        }
    }

    /// Sets the time in nanoseconds since the start, and does the work that is due. Returns whether
    /// there is more work now.
    pub fn poll(&mut self, now: u64) -> bool {
        self.run(now).more
    }

    /// Sets the time in nanoseconds since the start, and does work that is due, until it has done all
    /// or as much as one call may.
    pub fn run(&mut self, now: u64) -> Progress {
        self.set_time(now);
        let worked = self.run_timers() | self.run_queues();
        let more = self.budget == 0 || self.ready() > 0;
        Progress { worked, more, deadline: self.deadline() }
    }

    /// Sets the time, and makes the queues whose timers are due ready. Returns whether a timer was due.
    /// With [`Fabric::ready`] and [`Fabric::run_ready`], a caller decides the order of queues.
    pub fn start_turn(&mut self, now: u64) -> bool {
        self.set_time(now);
        self.run_timers()
    }

    /// The number of queues with work.
    pub fn ready(&self) -> usize {
        self.functions.iter().map(ready).sum()
    }

    /// The function of the ready queue with `before` others in front: those of lower functions come first.
    pub fn function_of_ready(&self, before: usize) -> Option<usize> {
        self.find_ready(before).map(|(number, _)| number)
    }

    /// As [`Fabric::function_of_ready`], with the number of ready queues of that function in front.
    fn find_ready(&self, mut before: usize) -> Option<(usize, usize)> {
        for (number, function) in self.functions.iter().enumerate() {
            match before.checked_sub(ready(function)) {
                Some(left) => before = left,
                None => return Some((number, before)),
            }
        }
        None
    }

    /// Runs the ready queue with `before` others in front for at most `wqes` WQEs; it stays ready, behind the
    /// others, if it has more. Returns whether it did anything.
    pub fn run_ready(&mut self, before: usize, wqes: usize) -> bool {
        let Some((number, before)) = self.find_ready(before) else { return false };
        let device = self.functions[number].device_mut();
        let Some(queue) = device.ready_queues.take(before) else { return false };
        self.budget = COST_PER_POLL;
        self.serve(number, queue, wqes)
    }

    /// Runs the timers that are due; returns whether one was.
    fn run_timers(&mut self) -> bool {
        let devices = self.functions.iter_mut().map(Function::device_mut);
        devices.fold(false, |due, device| device.run_timers() | due)
    }

    /// Serves each queue that is ready once, while the budget lasts. Returns whether one did anything.
    fn run_queues(&mut self) -> bool {
        let mut worked = false;
        self.budget = COST_PER_POLL;
        let (first, count) = (self.first, self.functions.len());
        for number in (0..count).map(|step| (first + step) % count) {
            if !self.functions[number].device().bus_master {
                continue;
            }
            for _ in 0..self.functions[number].device().ready_queues.len() {
                let device = self.functions[number].device_mut();
                let Some(queue) = device.ready_queues.take(0) else { break };
                worked |= self.serve(number, queue, WQES_PER_TURN);
                if self.budget == 0 {
                    self.first = (number + 1) % count;
                    return worked;
                }
            }
        }
        worked
    }

    /// Charges a WQE to the poll; returns false if the poll ends with it.
    fn charge(&mut self) -> bool {
        let cost: u64 = self.functions.iter().map(|function| function.device().take_cost()).sum();
        self.budget = self.budget.saturating_sub(cost.saturating_add(WQE_COST));
        self.budget > 0
    }

    /// When the next timer is due, in nanoseconds since the start.
    pub fn deadline(&self) -> Option<u64> {
        self.functions.iter().filter_map(|function| function.device().deadline()).min()
    }

    /// Executes WQEs of a queue, and makes it ready again if it may have more. Returns whether it did anything.
    fn serve(&mut self, number: usize, queue: u32, wqes: usize) -> bool {
        if self.functions[number].device().is_raw(queue) {
            return self.serve_raw_sq(number, queue, wqes);
        }
        let (mut request, mut answer) = std::mem::take(&mut self.work);
        let worked = self.serve_queue_pair(number, queue, wqes, &mut request, &mut answer);
        self.work = (request, answer);
        worked
    }

    fn serve_queue_pair(
        &mut self,
        number: usize,
        queue: u32,
        wqes: usize,
        request: &mut Request,
        answer: &mut Answer,
    ) -> bool {
        let mut worked = false;
        for _ in 0..wqes {
            if !self.charge() {
                self.functions[number].device_mut().schedule(queue);
                return worked;
            }
            match self.functions[number].device_mut().run_next_wqe(queue, request) {
                NextWqe::Idle => return worked,
                NextWqe::Done => {}
                NextWqe::Send((wqe, message, destination)) => {
                    let sender = self.functions[number].device_mut();
                    let (fate, ready) = sender.faults.message_fate(sender.now, queue);
                    ready.into_iter().for_each(|queue| sender.schedule(queue));
                    sender.record_fate(queue, fate);
                    if let MessageFate::Delayed(wait) = fate {
                        sender.schedule_after(queue, wait);
                        return true;
                    }
                    let response = match fate {
                        MessageFate::Lost => Response::Lost,
                        _ => self.deliver(number, &message, destination, answer),
                    };
                    let sender = self.functions[number].device_mut();
                    sender.record_refusal(queue, &response);
                    // An unreliable queue pair gets no response, so it does not wait.
                    let waits = matches!(response, Response::Lost | Response::RnrNak(_))
                        && sender.is_reliable(queue);
                    sender.handle_response(queue, &wqe, &message, response, &answer.data);
                    if waits {
                        return true;
                    }
                }
            }
            worked = true;
        }
        if self.functions[number].device().has_rung_sends(queue) {
            self.functions[number].device_mut().schedule(queue);
        }
        worked
    }

    fn serve_raw_sq(&mut self, number: usize, queue: u32, wqes: usize) -> bool {
        let mut worked = false;
        for _ in 0..wqes {
            if !self.charge() {
                break;
            }
            match self.functions[number].device_mut().run_next_raw_wqe(queue) {
                NextFrames::Idle => return worked,
                NextFrames::Done => {}
                NextFrames::Frames(frames, domain) => {
                    for frame in frames {
                        self.broadcast(number, &frame, domain);
                    }
                }
            }
            worked = true;
        }
        self.functions[number].device_mut().schedule(queue);
        worked
    }

    /// Sends a frame to every port; each port takes frames that are for it.
    fn broadcast(&mut self, from: usize, frame: &[u8], domain: u32) {
        for to in 0..self.functions.len() {
            if self.can_reach(from, to) {
                let own = (from == to).then_some(domain);
                self.functions[to].device_mut().receive_frame(frame, own);
            }
        }
    }

    /// Delivers a message to its destination.
    fn deliver(
        &mut self,
        from: usize,
        message: &Message<'_>,
        destination: Destination,
        answer: &mut Answer,
    ) -> Response {
        if let Destination::Group(group) = destination {
            let sender = self.functions[from].device();
            let no_loopback = sender
                .objects
                .qps
                .get(message.source_qpn)
                .is_ok_and(|qp| qp.context.is_set(qpc::block_lb_mc));
            for number in 0..self.functions.len() {
                if !self.can_reach(from, number) {
                    continue;
                }
                let device = self.functions[number].device_mut();
                for qpn in device.objects.multicast_groups.members(&group) {
                    // A sender that is a member of the group receives its own message, unless
                    // `block_lb_mc` is set.
                    if no_loopback && number == from && qpn == message.source_qpn {
                        continue;
                    }
                    device.respond(&Message { qpn, ..message.clone() }, answer);
                }
            }
            return Response::Ack;
        }
        let is_destination = |number: &usize| {
            let port = &self.functions[*number].device().port;
            self.can_reach(from, *number)
                && match destination {
                    Destination::Lid(lid) => port.lid() == lid,
                    Destination::Gid(gid) => port.has_roce_address(gid, message.vlan()),
                    Destination::Group(_) => false,
                }
        };
        // A function finds its own address first, even if another function has the same.
        let to = std::iter::once(from).chain(0..self.functions.len()).find(is_destination);
        match to {
            Some(to) => self.functions[to].device_mut().respond(message, answer),
            None => Response::Lost,
        }
    }

    /// Whether a message from one port can reach another: both links are up and of one type, or it
    /// is the same port, and the destination may access memory.
    fn can_reach(&self, from: usize, to: usize) -> bool {
        let (a, b) = (self.functions[from].device(), self.functions[to].device());
        let port_type = |device: &Device| -> PortType { device.options.port_type };
        b.bus_master
            && (from == to || a.port.active() && b.port.active() && port_type(a) == port_type(b))
    }
}
