//! Advice about sharing GPUs, as pure functions without I/O.
//!
//! ```text
//! Needs ──decision tree──► Leaf ──fit──► layout, or leases per GPU ──► config lines
//!   └──packing bound──► how many tenants memory and compute admit
//! Arrivals ──queueing──► served requests and latency with MIG, MPS and time-slicing
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `needs` | what the tenants need, and which needs contradict each other |
//! | `decision_tree` | the eight questions, and the path through them |
//! | `leaf` | the six answers, with their trade-offs and neighbours |
//! | `packing_bound` | how many tenants fit on a GPU |
//! | `fit` | MIG profiles and layouts of a GPU |
//! | `config_lines` | the config lines of an answer |
//! | `advice` | the advice for the GPUs of a host |
//! | `queueing` | the queueing model |
//! | `gains` | measured gains, with their sources |

mod advice;
mod config_lines;
mod decision_tree;
mod fit;
mod gains;
mod leaf;
mod needs;
mod packing_bound;
pub mod queueing;

pub use self::{
    advice::{Advice, ModelAdvice, ModelPacking, advise, packing_of_models},
    decision_tree::{Branch, Next, Node, PathStep, Question, TREE, TreeAnswer, walk},
    fit::{InstanceFit, Placed},
    gains::{GAINS, Gain},
    leaf::{Leaf, Neighbour},
    needs::{DriverOwner, Needs},
    packing_bound::{Demand, Packing, Realization, Resource, packing},
};
