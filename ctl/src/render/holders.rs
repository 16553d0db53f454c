//! The table of `gpushctl gpu holders`.

use gpush_api::{GpuHolders, Holder};

use super::{
    Appearance,
    listing::Listing,
    table::{Align, Narrow},
};

/// Lists what has GPUs open.
pub(crate) fn list(all: &[GpuHolders], look: &Appearance) -> Listing {
    use Align::{Left, Right};
    let columns = [("GPU", Right), ("PID", Right), ("USER", Left), ("UNIT", Left), ("DEVICES", Left), ("WHAT", Left)];
    let each = || all.iter().flat_map(|gpu| gpu.holders.iter().map(move |holder| (gpu, holder)));
    let rows = each().map(|(gpu, holder)| row(gpu.gpu, holder, look)).collect();
    Listing::new(&columns, rows, Narrow::spare(&["DEVICES"]).prose(), look)
        .names(each().filter_map(|(_, holder)| Some(holder.pid?.to_string())))
        .uuids(each().map(|(gpu, _)| gpu.gpu_uuid.clone()))
        .or_empty("Nothing has these GPUs open, except gpushd itself.")
}

fn row(gpu: u32, holder: &Holder, look: &Appearance) -> Vec<String> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let user = holder.user.clone().or_else(|| holder.uid.map(|uid| format!("uid {uid}")));
    let module = holder.module.as_ref().map(|name| format!("kernel module {name}"));
    let what = module.or_else(|| holder.mps.clone()).or_else(|| holder.command.clone());
    let devices = (!holder.devices.is_empty()).then(|| holder.devices.join(" "));
    vec![
        gpu.to_string(),
        or_dash(holder.pid.map(|pid| pid.to_string())),
        or_dash(user.map(|user| look.clean(&user))),
        or_dash(holder.unit.as_ref().map(|unit| look.clean(unit))),
        or_dash(devices.map(|devices| look.clean(&devices))),
        or_dash(what.map(|what| look.clean(&what))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn each_kind_of_holder_has_a_line() {
        let devices = || vec!["/dev/nvidia0".to_owned()];
        let monitor = Holder {
            pid: Some(812),
            uid: Some(0),
            user: Some("root".to_owned()),
            command: Some("nv-hostengine -n".to_owned()),
            unit: Some("nvidia-dcgm.service".to_owned()),
            devices: devices(),
            ..Holder::default()
        };
        let server = Holder {
            pid: Some(4107),
            uid: Some(1000),
            mps: Some("MPS server of GPU 0".to_owned()),
            unit: Some("gpushd-mps@g0.service".to_owned()),
            devices: devices(),
            ..Holder::default()
        };
        let hidden = Holder { unit: Some("session-3.scope".to_owned()), devices: devices(), ..Holder::default() };
        let module = Holder { module: Some("nvidia_drm".to_owned()), ..Holder::default() };
        let holders = vec![monitor, server, hidden, module];
        let all = [GpuHolders { gpu: 0, gpu_uuid: "GPU-0".to_owned(), holders }];
        insta::assert_snapshot!(list(&all, &fixtures::look(100, Charset::Ascii)).text(), @"");
    }
}
