//! Results that concern the whole host: maintenance, and an accepted loss.

use gpush_api::{Gpu, Maintenance, Recovered};

use super::{Appearance, status::gpu_numbers};

/// Draws the state after `maintenance enter` or `leave`.
pub(crate) fn maintenance(maintenance: Option<&Maintenance>, look: &Appearance) -> String {
    let text = match maintenance {
        Some(maintenance) => {
            let reason = maintenance.reason.as_ref().map_or_else(String::new, |why| format!(" ({})", look.clean(why)));
            format!(
                "In maintenance{reason}: gpushd has no handle of the driver open, and changes nothing until an \
                administrator runs `gpushctl maintenance leave`."
            )
        }
        None => "Not in maintenance.".to_owned(),
    };
    look.wrap("", &text).join("\n") + "\n"
}

/// Draws the result of `recover`.
pub(crate) fn recovered(recovered: &Recovered, gpus: &[Gpu], look: &Appearance) -> String {
    let Some(cause) = &recovered.cause else { return "Nothing to do: no GPU is held.\n".to_owned() };
    let mut lines = look.wrap("", &format!("The loss of the database is acknowledged: {}.", look.clean(cause)));
    if let Some(kept) = &recovered.kept {
        lines.extend(look.wrap("  ", &format!("the damaged database is kept as {}", look.clean(kept))));
    }
    let numbers: Vec<u32> =
        gpus.iter().filter(|gpu| recovered.released.contains(&gpu.uuid)).map(|gpu| gpu.index).collect();
    if !numbers.is_empty() {
        let (is, stays) = if numbers.len() == 1 { ("is", "stays as it is") } else { ("are", "stay as they are") };
        let text = format!(
            "{} {is} no longer held, and {stays}; `gpushctl mig plan` shows the difference from the config.",
            gpu_numbers(&numbers)
        );
        lines.extend(look.wrap("", &text));
    }
    lines.join("\n") + "\n"
}
