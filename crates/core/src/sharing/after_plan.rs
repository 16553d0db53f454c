//! The MIG devices that are shared through MPS after a plan.

use std::collections::BTreeSet;

use gpush_api::{Gpu, GpuPlan, Mig, TargetUuid};

use super::devices::{self, DeviceUses, SharedDevice};
use crate::{layout::Layout, plan::outcome};

/// A MIG device that is shared through MPS after a plan.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceAfter {
    /// UUID; `None` if the plan creates the device.
    pub uuid: Option<TargetUuid>,
    /// Name, such as `3g.40gb@4`.
    pub device: String,
}

/// Returns the devices that `layout` shares on a GPU after a plan, sorted by placement. `shared_before` contains the
/// UUIDs of the devices that have a daemon now.
#[must_use]
pub fn shared_after(
    layout: &Layout,
    gpu: &Gpu,
    plan: &GpuPlan,
    shared_before: &BTreeSet<TargetUuid>,
) -> Vec<DeviceAfter> {
    let Some(mig) = &gpu.mig else { return Vec::new() };
    if !plan.mig_mode().unwrap_or(mig.enabled) {
        return Vec::new();
    }
    let after = Mig { instances: outcome(&mig.instances, plan.instance_steps()), ..mig.clone() };
    let shared = devices::shared(layout, &after, &DeviceUses::of(gpu, shared_before));
    let named =
        |device: SharedDevice<'_>| DeviceAfter { uuid: device.compute.uuid.clone(), device: device.display_name() };
    shared.into_iter().map(named).collect()
}

#[cfg(test)]
mod tests {
    use gpush_api::{LayoutSource, PlanRequest};

    use super::*;
    use crate::{config::Config, desired, preset};

    /// Plans a layout on a GPU with MIG devices `MIG-0`, `MIG-1` …, and returns the devices that it then shares.
    fn after(have: &[&str], layout: &[&str], shared_before: &[&str]) -> Vec<(Option<TargetUuid>, String)> {
        let mut gpus = preset::gpus("dgx-a100").unwrap();
        gpus.truncate(1);
        let config = Config::parse("[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"none\"]\n", "c").unwrap();
        let plan = |gpus: &[Gpu], layout: &[&str]| {
            let entries = LayoutSource::Entries(layout.iter().map(|entry| (*entry).to_owned()).collect());
            let request = PlanRequest { gpus: vec!["0".to_owned()], layout: entries };
            desired::plan_host(&config, gpus, &request).unwrap().plans.remove(0)
        };
        let first = plan(&gpus, have);
        let mig = gpus[0].mig.as_mut().unwrap();
        mig.set_mode(true, true);
        mig.instances = outcome(&[], first.instance_steps());
        mig.instances.sort_by_key(|instance| instance.placement);
        for (number, instance) in (0_u32..).zip(&mut mig.instances) {
            instance.id = number;
            instance.compute[0].uuid = Some(format!("MIG-{number}").into());
        }
        let wanted: Vec<String> = layout.iter().map(|entry| (*entry).to_owned()).collect();
        let before = shared_before.iter().map(|uuid| (*uuid).into()).collect();
        let shared = shared_after(&Layout::parse_list(&wanted).unwrap(), &gpus[0], &plan(&gpus, layout), &before);
        shared.into_iter().map(|one| (one.uuid, one.device)).collect()
    }

    #[test]
    fn kept_device_has_its_uuid_and_a_new_device_has_none() {
        let kept = |uuid: &TargetUuid, device: &str| (Some(uuid.clone()), device.to_owned());
        assert_eq!(after(&["3g.40gb@4"], &["3g.40gb:mps"], &[]), [kept(&"MIG-0".into(), "3g.40gb@4")]);
        assert_eq!(after(&["3g.40gb@4"], &["3g.40gb@4", "3g.40gb@0:mps"], &[]), [(None, "3g.40gb@0".to_owned())]);
        assert_eq!(after(&["3g.40gb@4"], &["3g.40gb"], &["MIG-0"]), []);
        assert_eq!(
            after(&["3g.40gb*2"], &["3g.40gb:mps", "3g.40gb"], &["MIG-1"]),
            [kept(&"MIG-1".into(), "3g.40gb@4")]
        );
    }
}
