//! Metrics with the real Prometheus: the alerts and dashboards of `packaging/`.

mod alerts;
mod dashboards;
mod end_to_end;
mod files;
mod prometheus;
mod relay;
mod scenario;
