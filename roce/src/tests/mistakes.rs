//! Mistakes that are planted in requester and responder: the seeds find each of them.

use super::plan;
use super::seeds::SEEDS;
use crate::mistake::Mistake;
use crate::opcodes::Transport;

/// Each mistake, and a transport that has it.
const MISTAKES: [(Mistake, Transport); 19] = [
    (Mistake::AckTwice, Transport::Rc),
    (Mistake::AckCompletesRead, Transport::Rc),
    (Mistake::AckOneTooFar, Transport::Xrc),
    (Mistake::ReadGap, Transport::Rc),
    (Mistake::RepeatedData, Transport::Xrc),
    (Mistake::RetriesNotReset, Transport::Rc),
    (Mistake::RnrTimerNotRestarted, Transport::Rc),
    (Mistake::TimeoutNotRestarted, Transport::Xrc),
    (Mistake::NoFence, Transport::Rc),
    (Mistake::WindowOneTooFar, Transport::Rc),
    (Mistake::ReadDepthOneTooFar, Transport::Xrc),
    (Mistake::PsnWithoutWrap, Transport::Rc),
    (Mistake::SendTwice, Transport::Xrc),
    (Mistake::AtomicTwice, Transport::Rc),
    (Mistake::ReadFromBegin, Transport::Xrc),
    (Mistake::NakForgotten, Transport::Rc),
    (Mistake::UcGap, Transport::Uc),
    (Mistake::UcTwice, Transport::Uc),
    (Mistake::Padding, Transport::Ud),
];

#[test]
fn each_mistake_is_found_by_a_seed() {
    for (mistake, transport) in MISTAKES {
        Mistake::plant(Some(mistake));
        let found = (0..SEEDS).find_map(|seed| plan::run(transport, seed).err());
        Mistake::plant(None);
        match found {
            Some(why) => std::println!("{mistake:?}: {why}"),
            None => panic!("no seed finds {mistake:?}"),
        }
    }
}
