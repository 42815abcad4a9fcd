//! Two endpoints and a network that loses, doubles, delays and damages packets, in virtual time.
//!
//! | file | subject |
//! |---|---|
//! | `device` | a device in plain memory, which notes all that happens |
//! | `network` | the network, and the loop that moves packets and time |
//! | `plan` | requests drawn from a seed, and what they must have done when they complete |
//! | `seeds` | many seeds for each transport |
//! | `mistakes` | mistakes that are planted, and that the seeds find |
//! | `rules` | one rule at a time: retries, NAKs, windows, states |
//! | `hostile` | peers that send anything |
//! | `codec` | headers |
//! | `units` | packets that come as one, and what they do one by one |
//! | `congestion` | the window that losses make smaller |
//! | `cm` | messages of the connection manager |

mod cm;
mod codec;
mod congestion;
mod device;
mod hostile;
mod mistakes;
mod network;
mod plan;
mod rules;
mod seeds;
mod units;
