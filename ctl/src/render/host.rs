//! Results of commands about the whole host: maintenance, and an accepted loss of the database.

use gpush_api::{Gpu, GpuIndex, Maintenance, Recovered};

use super::{Appearance, names, names::gpu_numbers};

/// What gpushd does during maintenance.
const MEANWHILE: &str = "gpushd has no driver handle open, and changes nothing until an administrator runs \
                         `gpushctl maintenance leave`.";

/// Returns the reason of a maintenance in parentheses.
fn reason(maintenance: &Maintenance, look: &Appearance) -> String {
    maintenance.reason.as_ref().map_or_else(String::new, |why| format!(" ({})", look.clean(why)))
}

fn paragraph(text: &str, look: &Appearance) -> String {
    look.wrap("", text).join("\n") + "\n"
}

/// Draws the result of `maintenance enter`.
pub(crate) fn entered(maintenance: Option<&Maintenance>, look: &Appearance) -> String {
    let reason = maintenance.map_or_else(String::new, |maintenance| reason(maintenance, look));
    paragraph(&format!("In maintenance{reason}: {MEANWHILE}"), look)
}

/// Draws the result of `maintenance leave`. `before` is the maintenance that has ended.
pub(crate) fn left(before: Option<&Maintenance>, look: &Appearance) -> String {
    let text = match before {
        Some(before) => format!("Maintenance ended{}: gpushd opens the GPUs again.", reason(before, look)),
        None => "No change: the host was not in maintenance.".to_owned(),
    };
    paragraph(&text, look)
}

/// Says that the host is in maintenance, since when and why.
pub(crate) fn in_maintenance(maintenance: &Maintenance, look: &Appearance) -> String {
    let by = maintenance.by.as_ref().map_or_else(String::new, |by| format!(" by {}", names::actor(by, look)));
    let since = look.ago(maintenance.since);
    let reason = reason(maintenance, look);
    paragraph(&format!("In maintenance{reason}, entered{by} {since}: {MEANWHILE}"), look)
}

/// Draws the result of `recover`.
pub(crate) fn recovered(recovered: &Recovered, gpus: &[Gpu], look: &Appearance) -> String {
    let Some(cause) = &recovered.cause else { return "Nothing to do: no GPU is held.\n".to_owned() };
    let mut lines = look.wrap("", &format!("The loss of the database is acknowledged: {}.", look.clean(cause)));
    if let Some(kept) = &recovered.kept {
        lines.extend(look.wrap("  ", &format!("the damaged database is kept as {}", look.clean(kept))));
    }
    let numbers: Vec<GpuIndex> =
        gpus.iter().filter(|gpu| recovered.released.contains(&gpu.uuid)).map(|gpu| gpu.index).collect();
    if !numbers.is_empty() {
        let (is, its) = if numbers.len() == 1 { ("is", "its") } else { ("are", "their") };
        let text = format!(
            "{} {is} no longer held, and {its} instances are unchanged; `gpushctl mig apply --dry-run` shows the difference from \
            the config.",
            gpu_numbers(&numbers)
        );
        lines.extend(look.wrap("", &text));
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use gpush_api::Actor;

    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn maintenance_commands_say_what_changed() {
        let look = fixtures::look(400, Charset::Ascii);
        let maintenance = Maintenance {
            reason: Some("driver 570".to_owned()),
            by: Some(Actor { uid: 0, user: Some("root".to_owned()), pid: None }),
            since: look.now - jiff::SignedDuration::from_secs(40),
        };
        let texts = [
            entered(Some(&maintenance), &look),
            left(Some(&maintenance), &look),
            left(None, &look),
            in_maintenance(&maintenance, &look),
        ];
        insta::assert_snapshot!(texts.concat(), @r"
        In maintenance (driver 570): gpushd has no driver handle open, and changes nothing until an administrator runs `gpushctl maintenance leave`.
        Maintenance ended (driver 570): gpushd opens the GPUs again.
        No change: the host was not in maintenance.
        In maintenance (driver 570), entered by root 40s ago: gpushd has no driver handle open, and changes nothing until an administrator runs `gpushctl maintenance leave`.
        ");
    }
}
