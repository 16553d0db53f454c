//! Parses the values of a group: filters, devices, booleans, and profiles with their counts.

use gpush_api::GpuIndex;
use std::rc::Rc;

use super::{DeviceId, Devices, read::PartedReader};
use crate::{
    layout::{Entry, Layout, MOST, MOST_IN_ALL},
    quote::Quoted,
    yaml::{Node, NodeKind},
};

/// Maximum number of indexes in one group.
const MOST_DEVICES: usize = 1024;

impl PartedReader<'_> {
    pub(super) fn filter(&mut self, node: &Node) -> Option<Vec<DeviceId>> {
        let texts: Vec<&Node> = match &node.kind {
            NodeKind::Scalar { text, .. } if text.is_empty() => Vec::new(),
            NodeKind::Scalar { .. } => vec![node],
            NodeKind::List(items) => items.iter().map(Rc::as_ref).collect(),
            NodeKind::Map(_) => {
                let hint = "write one PCI id, or a list of PCI ids: [\"0x20B210DE\"]";
                self.report(&node.span, "`device-filter` takes PCI ids, not a mapping", hint);
                return None;
            }
        };
        let mut ids = Vec::new();
        let mut well = true;
        for node in texts {
            match node.text().map(str::parse::<DeviceId>) {
                Some(Ok(id)) => ids.push(id),
                Some(Err(hint)) => {
                    let what = format!("{} is not a PCI id", Quoted(node.text().unwrap_or_default()));
                    self.report(&node.span, what, hint);
                    well = false;
                }
                None => {
                    let what = format!("`device-filter` takes PCI ids, not {}", node.what());
                    self.report(&node.span, what, "write the PCI ids in one list: [\"0x20B210DE\", \"0x20B510DE\"]");
                    well = false;
                }
            }
        }
        well.then_some(ids)
    }

    pub(super) fn devices(&mut self, node: &Node) -> Option<Devices> {
        let hint = "write all, or a list of indexes: [0, 1]";
        let items = match &node.kind {
            NodeKind::Scalar { text, .. } if text == "all" => return Some(Devices::All),
            NodeKind::List(items) => items,
            NodeKind::Scalar { text, .. } => {
                let what = format!("`devices` takes `all` or a list, not {}", Quoted(text));
                self.report(&node.span, what, hint);
                return None;
            }
            NodeKind::Map(_) => {
                self.report(&node.span, "`devices` takes `all` or a list, not a mapping", hint);
                return None;
            }
        };
        if items.is_empty() {
            self.report(&node.span, "`devices` is empty: the group selects no GPU", hint);
            return None;
        }
        if items.len() > MOST_DEVICES {
            self.report(&node.span, format!("`devices` lists more than {MOST_DEVICES} GPUs"), "write all");
            return None;
        }
        let mut indexes = Vec::new();
        let mut well = true;
        for item in items {
            match &item.kind {
                NodeKind::Scalar { text, plain: true } if digits(text) && text.len() <= 9 => {
                    indexes.extend(text.parse::<u32>());
                }
                NodeKind::Scalar { text, .. } => {
                    self.report(&item.span, format!("{} is not the index of a GPU", Quoted(text)), hint);
                    well = false;
                }
                NodeKind::List(_) | NodeKind::Map(_) => {
                    self.report(&item.span, format!("`devices` takes indexes, not {}", item.what()), hint);
                    well = false;
                }
            }
        }
        indexes.sort_unstable();
        indexes.dedup();
        well.then_some(Devices::Listed(indexes.into_iter().map(GpuIndex).collect()))
    }

    /// Parses `true`, `false`, and the other booleans of YAML 1.1 that mig-parted accepts.
    pub(super) fn flag(&mut self, node: &Node) -> Option<bool> {
        if let NodeKind::Scalar { text, plain: true } = &node.kind {
            match text.to_ascii_lowercase().as_str() {
                "true" | "yes" | "on" | "y" => return Some(true),
                "false" | "no" | "off" | "n" => return Some(false),
                _ => {}
            }
        }
        let found = match node.text() {
            Some(text) => Quoted(text).to_string(),
            None => node.what().to_owned(),
        };
        self.report(&node.span, format!("`mig-enabled` takes true or false, not {found}"), "write true or false");
        None
    }

    /// Parses a map of profiles and counts into a layout. Keeps the order of the file.
    pub(super) fn layout(&mut self, node: &Node) -> Option<Layout> {
        let example = "write a profile and a count on each line, as in \"1g.10gb\": 7; for no instance, write {}";
        let NodeKind::Map(entries) = &node.kind else {
            let what = format!("`mig-devices` takes profiles with counts, not {}", node.what());
            self.report(&node.span, what, example);
            return None;
        };
        let mut layout = Layout::none();
        let mut well = true;
        for (key, value) in entries {
            let (profile, count) = (self.profile(key), self.count(key, value));
            let (Some(profile), Some(count)) = (profile, count) else {
                well = false;
                if self.has_max_problems() {
                    break;
                }
                continue;
            };
            let mut same = layout.entries.iter();
            if same.any(|e| (e.compute_slices, &e.profile) == (profile.compute_slices, &profile.profile)) {
                let what = format!("{} is another spelling of a profile above", Quoted(key.text().unwrap_or_default()));
                self.report(&key.span, what, "keep one of the two");
                well = false;
                continue;
            }
            let sum: usize = layout.entries.iter().map(|entry| usize::from(entry.count)).sum();
            if sum + usize::from(count) > MOST_IN_ALL {
                let what = format!("with this profile the group has more than {MOST_IN_ALL} instances");
                self.report(&key.span, what, "write the counts for one GPU");
                return None;
            }
            layout.entries.push(Entry { count, ..profile });
        }
        well.then_some(layout)
    }

    fn profile(&mut self, key: &Node) -> Option<Entry> {
        let text = key.text().unwrap_or_default();
        let shape = "write a profile such as 1g.10gb, 1g.10gb+me or 1c.3g.40gb";
        let read = Layout::parse(text).map(|layout| layout.entries);
        match read.as_deref() {
            Ok([entry]) if !text.contains(['@', '*', ':', ',']) => Some(entry.clone()),
            Ok(_) => {
                self.report(&key.span, format!("{} is not a MIG profile", Quoted(text)), shape);
                None
            }
            Err(error) => {
                let unknown = format!("{} is not a MIG profile", Quoted(text));
                let (what, hint) = match &error.meant {
                    Some(meant) => (unknown, format!("did you mean `{meant}`?")),
                    // For a compute instance such as `4c.3g.40gb`, the parser's message is more specific.
                    None if text.contains("c.") => (error.message.clone(), shape.to_owned()),
                    None => (unknown, shape.to_owned()),
                };
                self.report(&key.span, what, hint);
                None
            }
        }
    }

    fn count(&mut self, key: &Node, value: &Node) -> Option<u8> {
        let name = Quoted(key.text().unwrap_or_default());
        let hint = format!("write a number from 1 to {MOST}");
        let text = match &value.kind {
            NodeKind::Scalar { text, plain: true } => text,
            NodeKind::Scalar { plain: false, .. } | NodeKind::List(_) | NodeKind::Map(_) => {
                self.report(&value.span, format!("the count of {name} is not a number"), hint);
                return None;
            }
        };
        let negative = text.strip_prefix('-').is_some_and(digits);
        match text.parse::<u8>() {
            Ok(0) => {
                self.report(&value.span, format!("a count of 0 requests no instance of {name}"), "leave the line out");
                None
            }
            Ok(count) if digits(text) && count <= MOST => Some(count),
            Ok(_) | Err(_) => {
                let what = if negative {
                    format!("the count of {name} is below 0")
                } else if digits(text) {
                    format!("a count of {text:.8} is more instances of {name} than a GPU can hold")
                } else {
                    format!("the count of {name} is not a number: {}", Quoted(text))
                };
                self.report(&value.span, what, hint);
                None
            }
        }
    }
}

fn digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}
