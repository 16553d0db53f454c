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
    let mut columns =
        vec![("GPU", Right), ("PID", Right), ("USER", Left), ("UNIT", Left), ("DEVICES", Left), ("WHAT", Left)];
    if look.wide {
        columns.push(("GPU UUID", Left));
    }
    let each = || all.iter().flat_map(|gpu| gpu.holders.iter().map(move |holder| (gpu, holder)));
    let rows = each().map(|(gpu, holder)| row(gpu, holder, look)).collect();
    Listing::new(&columns, rows, Narrow::spare(&["DEVICES"]).prose(), look)
        .names(each().filter_map(|(_, holder)| Some(holder.pid?.to_string())))
        .uuids(each().map(|(gpu, _)| gpu.gpu_uuid.clone()))
        .or_empty("Nothing has these GPUs open, except gpushd itself.")
}

fn row(gpu: &GpuHolders, holder: &Holder, look: &Appearance) -> Vec<String> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let user = holder.user.clone().or_else(|| holder.uid.map(|uid| format!("uid {uid}")));
    let module = holder.module.as_ref().map(|name| format!("kernel module {name}"));
    let what = module.or_else(|| holder.mps.clone()).or_else(|| holder.command.clone());
    let devices = (!holder.devices.is_empty()).then(|| holder.devices.join(" "));
    let mut row = vec![
        gpu.gpu.to_string(),
        or_dash(holder.pid.map(|pid| pid.to_string())),
        or_dash(user.map(|user| look.clean(&user))),
        or_dash(holder.unit.as_ref().map(|unit| look.clean(unit))),
        or_dash(devices.map(|devices| look.clean(&devices))),
        or_dash(what.map(|what| look.clean(&what))),
    ];
    if look.wide {
        row.push(look.clean(gpu.gpu_uuid.as_str()));
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn each_kind_of_holder_has_a_line() {
        let drawn = list(&[fixtures::holders()], &fixtures::look(100, Charset::Ascii));
        insta::assert_snapshot!(fixtures::plain(drawn.text()), @r"
        GPU   PID  USER      UNIT                   DEVICES       WHAT
          0   812  root      nvidia-dcgm.service    /dev/nvidia0  nv-hostengine -n
          0  4107  uid 1000  gpushd-mps@g0.service  /dev/nvidia0  MPS server of GPU 0
          0     -  -         session-3.scope        /dev/nvidia0  -
          0     -  -         -                      -             kernel module nvidia_drm
        ");
    }
}
