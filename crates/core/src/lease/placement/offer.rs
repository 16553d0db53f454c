//! The names of requests, and smaller requests that the quota of the user allows.

use std::collections::BTreeSet;

use gpush_api::Gpu;

use super::{
    Host, PlacementRequest, RequestedDevice, RequestedShare,
    error_context::{ErrorContext, percent},
    size::rank,
};
use crate::lease::quota::{Allowance, Size};

impl PlacementRequest {
    /// Returns what the request asks for, for messages: `2g.20gb`, `an MPS share of 25 %`.
    #[must_use]
    pub fn describe(&self) -> String {
        match (&self.share, self.count) {
            (RequestedShare::Mig(RequestedDevice::Profile(profile)), 1) => profile.clone(),
            (RequestedShare::Mig(RequestedDevice::Profile(profile)), count) => format!("{count} devices {profile}"),
            (RequestedShare::Mig(_), 1) => "a MIG device".to_owned(),
            (RequestedShare::Mig(_), count) => format!("{count} MIG devices"),
            (RequestedShare::Mps { percentage: Some(percentage), .. }, _) => format!("an MPS share of {percentage} %"),
            (RequestedShare::Mps { percentage: None, .. }, _) => "an MPS share".to_owned(),
            (RequestedShare::Timeslice, _) => "a time-slice replica".to_owned(),
            (RequestedShare::Whole, 1) => "a whole GPU".to_owned(),
            (RequestedShare::Whole, count) => format!("{count} whole GPUs"),
        }
    }
}

/// Returns the flags of a request that is smaller than `wanted`, and that the quota allows: `--mig 1g.10gb`. `size` is the
/// size of `wanted`, which the quota does not allow. Returns `None` if the GPUs offer no such share.
#[must_use]
pub fn smaller(
    host: &Host,
    gpus: &[Gpu],
    wanted: &PlacementRequest,
    size: Size,
    allowance: Allowance<'_>,
) -> Option<String> {
    let count = u64::try_from(wanted.count).unwrap_or(1).max(1);
    let fits = |members: &u64| {
        let part = |amount: u64| amount.saturating_mul(*members).div_ceil(count);
        let number = |amount: u64| u32::try_from(amount).unwrap_or(u32::MAX);
        let (memory_mib, gpu_thousandths) = (part(size.memory_mib), number(part(size.gpu_thousandths.into())));
        let members = usize::try_from(*members).unwrap_or(usize::MAX);
        allowance.permits(wanted.share.kind(), Size { members, memory_mib, gpu_thousandths, ..size })
    };
    if let Some(fewer) = (1..count).rev().find(fits) {
        return Some(format!("--count {fewer}"));
    }
    let context = ErrorContext { host, gpus, allowed: None, duration: None, allowance: Some(allowance) };
    let selected = host.selected(wanted);
    match &wanted.share {
        RequestedShare::Mig(_) => {
            let offers = selected.gpus.iter().filter_map(|gpu| Some((gpu.index, gpu.mig.as_ref()?)));
            let mut names = BTreeSet::new();
            for (gpu, mig) in offers {
                for instance in &mig.instances {
                    let devices = instance.devices.iter().filter(|device| !device.shared);
                    let known = mig.geometry.profile(instance.profile_id).map(rank).unwrap_or_default();
                    names.extend(devices.map(|device| (known, device.whole, gpu, device.profile.as_str())));
                }
                // Profiles with a suffix have special engines, such as `1g.10gb+me`.
                let is_plain = |name: &str| !name.contains(['+', '-']);
                let created = mig.geometry.profiles.iter().filter(|known| mig.dynamic && is_plain(&known.profile.name));
                names.extend(created.map(|known| (rank(known), true, gpu, known.profile.name.as_str())));
            }
            let largest = names.into_iter().rev().find(|(.., gpu, name)| context.permits_device(*gpu, name));
            largest.map(|(.., name)| format!("--mig {name}"))
        }
        RequestedShare::Mps { .. } => {
            let targets = selected.gpus.iter().flat_map(|gpu| gpu.mps.iter().map(move |mps| (gpu.index, mps)));
            let targets = targets.filter(|(_, mps)| wanted.has_target(&mps.target));
            let tenths =
                targets.filter_map(|(gpu, mps)| context.largest_percentage(gpu, mps.memory_mib, 1000)).max()?;
            // Prefer a whole percentage.
            let rounded = if tenths >= 10 { tenths / 10 * 10 } else { tenths };
            Some(format!("--mps {}", percent(rounded)))
        }
        RequestedShare::Timeslice | RequestedShare::Whole => None,
    }
}
