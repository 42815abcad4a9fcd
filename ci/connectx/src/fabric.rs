//! The switch that connects functions.
//!
//! Pairs with the requester and responder of [`crate::data`]. No message is in flight between
//! calls: the destination executes a message while its sender waits.

use uverbs_uapi::mlx5::prm::qpc::qpc;

use crate::data::ethernet::Outgoing;
use crate::data::message::{Message, Response};
use crate::data::send::{Next, Target};
use crate::device::Device;
use crate::fault::MessageFate;
use crate::function::Function;
use crate::options::{Options, PortType};
use crate::port::GIDS;

/// WQEs that one queue may execute before the next queue has its turn.
const TURN: usize = 32;
/// What one poll may cost, in steps of about ten nanoseconds. After that the caller serves its
/// clients before it polls again.
const TURN_COST: u64 = 1 << 20;
/// What every WQE costs.
const REQUEST_COST: u64 = 64;

/// Functions behind one switch.
#[derive(Default)]
pub struct Fabric {
    functions: Vec<Function>,
    /// The function whose queues come first. It changes when a poll ends early, so that no queue
    /// waits for ever.
    first: usize,
    /// What the current poll may still cost.
    left: u64,
}

impl Fabric {
    /// Adds a function and returns its number.
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

    /// Sets the time in nanoseconds since the start, which guests read from the device's clock.
    pub fn set_time(&mut self, now: u64) {
        for function in &mut self.functions {
            function.device_mut().now = now;
        }
    }

    /// Sets the time in nanoseconds since the start, and does the work that is due. Returns whether
    /// there is more work now.
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

    /// Charges a WQE to the poll; returns false if the poll ends with it.
    fn pay(&mut self) -> bool {
        let cost: u64 = self.functions.iter().map(|function| function.device().take_cost()).sum();
        self.left = self.left.saturating_sub(cost.saturating_add(REQUEST_COST));
        self.left > 0
    }

    /// When the next timer is due, in nanoseconds since the start.
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
                    let (fate, ready) = sender.faults.next_message(sender.now, queue);
                    ready.into_iter().for_each(|queue| sender.wake(queue));
                    if let MessageFate::Delayed(wait) = fate {
                        return sender.wake_after(queue, wait);
                    }
                    let response = match fate {
                        MessageFate::Lost => Response::Lost,
                        _ => self.carry(number, &message, target),
                    };
                    let sender = self.functions[number].device_mut();
                    // An unreliable queue pair gets no response, so it does not wait.
                    let waits = matches!(response, Response::Lost | Response::RnrNak(_))
                        && sender.is_reliable(queue);
                    sender.finish(queue, &job, &message, response);
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

    /// Sends a frame to every port; each port takes frames that are for it.
    fn flood(&mut self, from: usize, frame: &[u8], domain: u32) {
        for to in 0..self.functions.len() {
            if self.reaches(from, to) {
                let own = (from == to).then_some(domain);
                self.functions[to].device_mut().receive_frame(frame, own);
            }
        }
    }

    /// Delivers a message to its destination.
    fn carry(&mut self, from: usize, message: &Message, target: Target) -> Response {
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
                for qpn in device.objects.multicast_groups.members(&group) {
                    // A sender that is a member of the group receives its own message, unless
                    // `block_lb_mc` is set.
                    if deaf && number == from && qpn == message.source_qpn {
                        continue;
                    }
                    device.respond(&Message { qpn, ..message.clone() });
                }
            }
            return Response::Ack;
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
        // A function finds its own address first, even if another function has the same.
        let to = std::iter::once(from).chain(0..self.functions.len()).find(is_target);
        match to {
            Some(to) => self.functions[to].device_mut().respond(message),
            None => Response::Lost,
        }
    }

    /// Whether a message from one port can reach another: both links are up and of one type, or it
    /// is the same port, and the destination may access memory.
    fn reaches(&self, from: usize, to: usize) -> bool {
        let (a, b) = (self.functions[from].device(), self.functions[to].device());
        let kind = |device: &Device| -> PortType { device.options.port_type };
        b.bus_master && (from == to || a.port.active() && b.port.active() && kind(a) == kind(b))
    }
}
