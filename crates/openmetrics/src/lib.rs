//! Writes metrics as text, in the classic format of Prometheus and in OpenMetrics 1.0. Pure functions without I/O.
//!
//! | | classic | OpenMetrics |
//! |---|---|---|
//! | counter `gpush_x` | `# TYPE gpush_x_total counter` | `# TYPE gpush_x counter` |
//! | unit | not written | `# UNIT gpush_x_bytes bytes` |
//! | end | not written | `# EOF` |
//!
//! Both formats have only gauges and counters: the parser for classic text refuses a file with other types. So the
//! identity of an object is a gauge with the value 1, whose name ends with `_info`.

mod accept;
mod text;

pub use accept::Format;
pub use text::{Family, Kind, Sample, render};
