//! Advice about sharing GPUs, as pure functions without I/O.
//!
//! ```text
//! Needs ──tree──► Leaf ──fit──► layout or number of leases per GPU ──rule──► config lines
//!   └────────────packing──► how many tenants memory and compute admit
//! Arrivals ──queue──► served requests and latency with MIG, MPS and time-slicing
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `needs` | what the tenants need, and which needs contradict each other |
//! | `tree` | the eight questions, and the path through them |
//! | `leaf` | the six answers, with their trade-offs and neighbours |
//! | `packing` | how many tenants fit on a GPU |
//! | `fit` | MIG profiles and layouts of a GPU |
//! | `rule` | the config lines of an answer |
//! | `answer` | the advice for the GPUs of a host |
//! | `queue` | the queueing model |
//! | `gains` | measured gains, with their sources |

mod answer;
mod fit;
mod gains;
mod leaf;
mod needs;
mod packing;
pub mod queue;
mod rule;
mod tree;

pub use self::{
    answer::{Advice, ModelAdvice, advise},
    fit::{InstanceFit, Placed},
    gains::{GAINS, Gain},
    leaf::{Leaf, Neighbour},
    needs::{Driver, Needs},
    packing::{Demand, Packing, Realization, Resource, packing},
    tree::{Answer, Branch, Next, Node, Question, Step, TREE, walk},
};
