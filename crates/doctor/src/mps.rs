//! NVIDIA's MPS programs: whether they are installed and have the driver's version.

use std::fs;

use gpush_api::Mode;
use gpush_core::config::{Config, RuleLayout};
use gpush_mps::protocol::version;

use crate::{Area, Finding, Host, driver};

pub(crate) fn examine(host: &Host, config: &Config) -> Vec<Finding> {
    let programs = [config.mps.control.clone(), config.mps.server()];
    let is_used = is_used(config);
    if let Some(path) = programs.iter().find(|path| !host.has(path)) {
        let message = format!("{path} is not installed");
        let hint = "install NVIDIA's MPS programs (Debian: nvidia-cuda-mps; RHEL: nvidia-driver-cuda), or set the path \
                    of the control daemon, mps.control of the config";
        return vec![if is_used {
            Finding::problem(Area::Mps, message, hint).cause("a rule or a layout of the config shares GPUs through MPS")
        } else {
            // No GPU of this host is shared through MPS, so this is not a problem.
            Finding::ok(Area::Mps, "NVIDIA's MPS programs are not installed, and no rule of the config needs them")
        }];
    }
    let bytes = fs::read(host.path(&config.mps.control)).unwrap_or_default();
    let built = version::of_program(&bytes);
    match (built, driver::module_version(host)) {
        (Some(built), Some(module)) if built != module => {
            let message = format!("the MPS programs have version {built}, but the driver has version {module}");
            let hint = "install the MPS programs and the driver from the same driver release";
            vec![Finding::warning(Area::Mps, message, hint).cause(config.mps.control.clone())]
        }
        (Some(built), _) => vec![Finding::ok(Area::Mps, format!("MPS programs {built}"))],
        (None, _) => vec![Finding::ok(
            Area::Mps,
            format!("MPS programs are installed, but their version is unknown: {}", config.mps.control),
        )],
    }
}

/// Returns whether the config shares GPUs or MIG devices through MPS.
fn is_used(config: &Config) -> bool {
    let inline = config.rules.iter().filter_map(|rule| match &rule.layout {
        Some(RuleLayout::Inline(layout)) => Some(layout),
        Some(RuleLayout::Named(_) | RuleLayout::Dynamic) | None => None,
    });
    let mut entries = inline.chain(config.layouts.values()).flat_map(|layout| &layout.entries);
    config.rules.iter().any(|rule| rule.mode == Mode::Mps) || entries.any(|entry| entry.share.is_some())
}
