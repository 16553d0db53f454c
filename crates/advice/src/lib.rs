//! Advice about sharing GPUs, as pure functions without I/O.
//!
//! ```text
//! Needs ──decision tree──► Leaf ──fit──► layout, or leases per GPU ──► config lines
//!   └──packing bound──► how many tenants memory and compute admit
//! Arrivals ──queueing──► served requests and latency with MIG, MPS and time-slicing
//! recorded use ──right size──► smaller shares ──totals──► by user and GPU
//! recorded requests ──replay──► requests that a layout meets ──► best layouts of the host
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `needs` | the needs of the tenants, and contradictions between them |
//! | `decision_tree` | the eight questions, and the path through them |
//! | `leaf` | the six answers, with their trade-offs and neighbours |
//! | `packing_bound` | how many tenants fit on a GPU |
//! | `fit` | MIG profiles and layouts of a GPU |
//! | `config_lines` | the config lines of an answer |
//! | `advice` | the advice for the GPUs of a host |
//! | `queueing` | the queueing model |
//! | `gains` | measured gains, with their sources |
//! | `right_size` | the smallest share that would have been enough for a lease |
//! | `evidence` | the confidence of such an advice |
//! | `size_totals` | such advice for the leases of a user or of a GPU together |
//! | `request_replay` | the recorded requests, and how many of them a number of shares meets |
//! | `possible_layouts` | the layouts of a GPU in which nothing more fits |
//! | `best_layouts` | the layouts of all GPUs that meet the most requests |
//! | `layout_advice` | today's layouts of a host compared with the best ones |

mod advice;
mod best_layouts;
mod config_lines;
mod decision_tree;
mod evidence;
mod fit;
mod gains;
mod layout_advice;
mod leaf;
mod needs;
mod packing_bound;
mod possible_layouts;
pub mod queueing;
mod request_replay;
mod right_size;
mod size_totals;

pub use self::{
    advice::{Advice, ModelAdvice, ModelPacking, advise, packing_of_models},
    decision_tree::{Branch, Next, Node, PathStep, Question, TREE, TreeAnswer, walk},
    evidence::{Confidence, Evidence, LEAST_KNOWN_S, Uncertainty},
    fit::{InstanceFit, Placed},
    gains::{GAINS, Gain},
    layout_advice::{GpuLayout, LayoutAdvice, ShareDemand, layout_advice},
    leaf::{Leaf, Neighbour},
    needs::{DriverOwner, Needs},
    packing_bound::{Demand, Packing, Realization, Resource, packing},
    request_replay::{MOST_REFUSALS, RequestTally, WHOLE},
    right_size::{NoAdvice, ObservedNeed, P98_MARGIN, PEAK_MARGIN, SizeAdvice, SizeVerdict, right_sizes},
    size_totals::{EnoughCount, SizeTotals, Totaled, size_totals},
};
