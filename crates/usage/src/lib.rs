//! The use of shares by leases: states, time, energy, history, bills, and the policies for unused leases and for leases
//! above their memory. Pure functions without I/O: the agent brings samples and times, and stores the results.
//!
//! ```text
//! samples, processes ──input──► judge ──► ledger ──► rows ──► accounts ──► reports, bills
//! leases begin, change, end ───────────────┘ │ ▲
//!                                            │ └─ energy
//!                                            └──► idle, over_limit ──► notices, ends
//! ```
//!
//! | module | subject |
//! |---|---|
//! | `moment`, `share` | points in time; shares of a GPU as integers |
//! | `input` | samples of GPUs, holds of leases |
//! | `judge` | busy, idle, empty or unknown |
//! | `energy` | attributes the energy of a board |
//! | `idle` | when gpushd reports an unused lease, warns its holder and ends it |
//! | `over_limit` | when gpushd reports a lease above its memory limit, and ends it |
//! | `ledger` | sums of time, memory, activity and energy, which add up exactly for each GPU |
//! | `account` | rows of leases and days, reports |
//! | `bill` | bills of a month, CSV, FOCUS |

pub mod account;
pub mod bill;
pub mod energy;
pub mod idle;
pub mod input;
pub mod judge;
pub mod ledger;
pub mod moment;
pub mod over_limit;
#[cfg(test)]
mod samples;
pub mod settled_clock;
pub mod share;
