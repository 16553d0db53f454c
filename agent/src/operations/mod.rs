//! Everything that changes GPUs on request: operations, their queue, overrides, and the conditions of GPUs that
//! administrators set.

pub(crate) mod apply;
pub(crate) mod cordon;
pub(crate) mod maintenance;
pub(crate) mod operation;
pub(crate) mod overrides;
pub(crate) mod recover;
pub(crate) mod scheduler;
