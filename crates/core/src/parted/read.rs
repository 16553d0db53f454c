//! From nodes to a file: what is there, what is missing, what can't be meant. All that is wrong is
//! told at once, each with its place.

use std::{ops::Range, rc::Rc};

use super::{
    DeviceId, Devices, File, Group, Label, MOST_BYTES, Want,
    yaml::{self, Kind, Node},
};
use crate::{
    diagnostic::{Document, FileErrors, Problem},
    layout::{Entry, Layout, MOST, MOST_IN_ALL},
    nearest::nearest,
    quote::Quoted,
};

/// Most problems that are told: a page.
const MOST_PROBLEMS: usize = 50;

/// Most groups of all labels together, and most indexes in one: aliases can multiply a small file.
const MOST_GROUPS: usize = 4096;
const MOST_DEVICES: usize = 1024;

const TOP: [&str; 2] = ["version", "mig-configs"];
const GROUP: [&str; 4] = ["devices", "device-filter", "mig-enabled", "mig-devices"];

pub(super) fn bytes(bytes: &[u8], path: &str) -> Result<File, FileErrors> {
    let fail = |text: &str, problem| Err(FileErrors::new(Document::MigParted, path, text, vec![problem]));
    if bytes.len() > MOST_BYTES {
        let what = format!("the file has more than {MOST_BYTES} bytes");
        return fail("", Problem::new(0..0, what, "is this the right file?"));
    }
    let text = match std::str::from_utf8(bytes) {
        // A byte order mark is none of YAML's text.
        Ok(text) => text.strip_prefix('\u{feff}').unwrap_or(text),
        Err(error) => {
            let lossy = String::from_utf8_lossy(bytes);
            let at = error.valid_up_to();
            let what = format!("the file is not UTF-8: byte {at} can't be read");
            return fail(&lossy, Problem::new(at..at + 3, what, "save the file as UTF-8"));
        }
    };
    let mut reader = Reader { text, problems: Vec::new(), groups: 0 };
    let labels = match yaml::document(text) {
        Ok(Some(root)) => reader.top(&root),
        Ok(None) => {
            reader.report(&(0..0), "the file is empty", "it begins with `version: v1`, then `mig-configs:`");
            Vec::new()
        }
        Err(wrong) => {
            let mut problem = Problem::new(reader.bytes(&wrong.span), wrong.message, wrong.hint);
            if let Some(first) = wrong.first {
                problem = problem.also(reader.bytes(&first), "the first is");
            }
            reader.problems.push(problem);
            Vec::new()
        }
    };
    if reader.problems.is_empty() {
        Ok(File { path: path.to_owned(), labels })
    } else {
        Err(FileErrors::new(Document::MigParted, path, text, reader.problems))
    }
}

struct Reader<'t> {
    text: &'t str,
    problems: Vec<Problem>,
    groups: usize,
}

impl Reader<'_> {
    /// A span of characters as one of bytes, on one line.
    fn bytes(&self, span: &Range<usize>) -> Range<usize> {
        let at = |n| self.text.char_indices().nth(n).map_or(self.text.len(), |(at, _)| at);
        let start = at(span.start);
        let line = self.text[start..].find(['\n', '\r']).map_or(self.text.len(), |n| start + n);
        start..at(span.end).clamp(start, line)
    }

    fn report(&mut self, span: &Range<usize>, message: impl Into<String>, hint: impl Into<String>) {
        if self.problems.len() < MOST_PROBLEMS {
            self.problems.push(Problem::new(self.bytes(span), message, hint));
        }
    }

    /// Whether there is no room for more problems, so that reading on tells nothing.
    fn full(&self) -> bool {
        self.problems.len() >= MOST_PROBLEMS
    }

    /// Refuses keys that are none of `known`, and gives back which of them were probably meant.
    fn strangers(&mut self, entries: &[yaml::Entry], known: &[&'static str], place: &str) -> Vec<&'static str> {
        let mut all = Vec::new();
        for (key, _) in entries {
            let name = key.text().unwrap_or_default();
            if known.contains(&name) {
                continue;
            }
            let hint = match nearest(name, known.iter().copied()) {
                _ if matches!(name, "apiVersion" | "kind" | "metadata" | "data") => {
                    "this is a Kubernetes object: give the file that it holds, such as `config.yaml` of its `data`"
                        .to_owned()
                }
                Some(meant) => {
                    all.extend(known.iter().copied().find(|known| *known == meant));
                    format!("did you mean `{meant}`?")
                }
                None => format!("there are: {}", known.join(", ")),
            };
            self.report(&key.span, format!("unknown key {} {place}", Quoted(name)), hint);
        }
        all
    }

    fn top(&mut self, root: &Node) -> Vec<Label> {
        let Kind::Map(entries) = &root.kind else {
            let what = format!("the file is {}, and a mig-parted file is a mapping", root.what());
            self.report(&root.span, what, "it begins with `version: v1`, then `mig-configs:`");
            return Vec::new();
        };
        let meant = self.strangers(entries, &TOP, "at the top of the file");
        match get(entries, "version") {
            Some(node) if node.text() == Some("v1") => {}
            Some(node) => {
                let what = match node.text() {
                    Some(text) => format!("there is no version {}", Quoted(text)),
                    None => format!("`version` is {}", node.what()),
                };
                self.report(&node.span, what, "write version: v1");
            }
            None if meant.contains(&"version") => {}
            None => self.report(&root.span, "the file does not say its version", "write version: v1 at its top"),
        }
        match get(entries, "mig-configs") {
            Some(node) => self.labels(node),
            None => {
                if !meant.contains(&"mig-configs") && !self.full() && meant.is_empty() && has_all_known(entries) {
                    self.report(&root.span, "the file has no `mig-configs`", "write mig-configs: and labels below");
                }
                Vec::new()
            }
        }
    }

    fn labels(&mut self, node: &Node) -> Vec<Label> {
        let entries = match &node.kind {
            Kind::Map(entries) if !entries.is_empty() => entries,
            Kind::Map(_) | Kind::List(_) | Kind::Scalar { .. } => {
                let what = format!("`mig-configs` takes labels, and this is {}", node.what());
                let what =
                    if matches!(node.kind, Kind::Map(_)) { "`mig-configs` has no label".to_owned() } else { what };
                self.report(&node.span, what, "write a name with a colon, and its groups below it");
                return Vec::new();
            }
        };
        let mut labels = Vec::new();
        for (key, value) in entries {
            let name = key.text().unwrap_or_default();
            if name.trim().is_empty() {
                self.report(&key.span, "a label has no name", "write a name before the colon");
                continue;
            }
            let items = match &value.kind {
                Kind::List(items) if !items.is_empty() => items,
                Kind::Scalar { .. } | Kind::Map(_) | Kind::List(_) => {
                    let what = format!("label {} has no list of groups", Quoted(name));
                    self.report(&key.span, what, "write `- devices: all` and what shall be of them below it");
                    continue;
                }
            };
            self.groups += items.len();
            if self.groups > MOST_GROUPS {
                let what = format!("with label {} the file has more than {MOST_GROUPS} groups", Quoted(name));
                self.report(&key.span, what, "put GPUs that shall be alike into one group");
                return labels;
            }
            let groups = items.iter().filter_map(|item| self.group(item)).collect();
            labels.push(Label { name: name.to_owned(), groups });
            if self.full() {
                break;
            }
        }
        labels
    }

    fn group(&mut self, node: &Node) -> Option<Group> {
        if self.full() {
            return None;
        }
        let Kind::Map(entries) = &node.kind else {
            let what = format!("a group is a mapping, and this is {}", node.what());
            self.report(&node.span, what, format!("its keys are: {}", GROUP.join(", ")));
            return None;
        };
        let meant = self.strangers(entries, &GROUP, "in a group");
        let filter = match get(entries, "device-filter") {
            Some(value) => self.filter(value)?,
            None => Vec::new(),
        };
        let devices = match get(entries, "devices") {
            Some(value) => self.devices(value),
            None => {
                self.missing(node, "devices", &meant, "write devices: all, or a list of indexes: [0, 1]");
                None
            }
        };
        let enabled = match get(entries, "mig-enabled") {
            Some(value) => self.flag(value),
            None => {
                self.missing(node, "mig-enabled", &meant, "write mig-enabled: true, or false");
                None
            }
        };
        let layout = get(entries, "mig-devices").map(|value| (value, self.layout(value)));
        let want = match (enabled?, layout) {
            (false, None) => Want::Off,
            (false, Some((_, layout))) if layout.as_ref().is_none_or(Layout::is_none) => {
                layout?;
                Want::Off
            }
            (false, Some((value, _))) => {
                let hint = "write mig-enabled: true, or leave mig-devices out";
                self.report(&value.span, "instances are wanted with `mig-enabled: false`", hint);
                return None;
            }
            (true, Some((_, layout))) => Want::On(layout?),
            (true, None) => {
                let hint = "write mig-devices: {\"1g.10gb\": 7}, or {} for no instance";
                self.missing(node, "mig-devices", &meant, hint);
                return None;
            }
        };
        Some(Group { line: node.line, filter, devices: devices?, want })
    }

    fn missing(&mut self, node: &Node, key: &str, meant: &[&str], hint: &str) {
        if !meant.contains(&key) {
            self.report(&node.span, format!("this group has no `{key}`"), hint);
        }
    }

    fn filter(&mut self, node: &Node) -> Option<Vec<DeviceId>> {
        let texts: Vec<&Node> = match &node.kind {
            Kind::Scalar { text, .. } if text.is_empty() => Vec::new(),
            Kind::Scalar { .. } => vec![node],
            Kind::List(items) => items.iter().map(Rc::as_ref).collect(),
            Kind::Map(_) => {
                let hint = "write one id, or a list of them: [\"0x20B210DE\"]";
                self.report(&node.span, "`device-filter` takes PCI ids, and this is a mapping", hint);
                return None;
            }
        };
        let mut ids = Vec::new();
        let mut well = true;
        for node in texts {
            match node.text().map(str::parse::<DeviceId>) {
                Some(Ok(id)) => ids.push(id),
                Some(Err(hint)) => {
                    let what = format!("{} is no PCI id", Quoted(node.text().unwrap_or_default()));
                    self.report(&node.span, what, hint);
                    well = false;
                }
                None => {
                    let what = format!("`device-filter` takes PCI ids, and this is {}", node.what());
                    self.report(&node.span, what, "write them side by side: [\"0x20B210DE\", \"0x20B510DE\"]");
                    well = false;
                }
            }
        }
        well.then_some(ids)
    }

    fn devices(&mut self, node: &Node) -> Option<Devices> {
        let hint = "write all, or a list of indexes: [0, 1]";
        let items = match &node.kind {
            Kind::Scalar { text, .. } if text == "all" => return Some(Devices::All),
            Kind::List(items) => items,
            Kind::Scalar { text, .. } => {
                let what = format!("`devices` takes `all` or a list, and this is {}", Quoted(text));
                self.report(&node.span, what, hint);
                return None;
            }
            Kind::Map(_) => {
                self.report(&node.span, "`devices` takes `all` or a list, and this is a mapping", hint);
                return None;
            }
        };
        if items.is_empty() {
            self.report(&node.span, "`devices` is empty: the group is for no GPU", hint);
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
                Kind::Scalar { text, plain: true } if digits(text) && text.len() <= 9 => {
                    indexes.extend(text.parse::<u32>());
                }
                Kind::Scalar { text, .. } => {
                    self.report(&item.span, format!("{} is no index of a GPU", Quoted(text)), hint);
                    well = false;
                }
                Kind::List(_) | Kind::Map(_) => {
                    self.report(&item.span, format!("`devices` takes indexes, and this is {}", item.what()), hint);
                    well = false;
                }
            }
        }
        indexes.sort_unstable();
        indexes.dedup();
        well.then_some(Devices::Listed(indexes))
    }

    /// `true` and `false`, and what YAML 1.1 means by them too: mig-parted's reader does.
    fn flag(&mut self, node: &Node) -> Option<bool> {
        if let Kind::Scalar { text, plain: true } = &node.kind {
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
        self.report(
            &node.span,
            format!("`mig-enabled` takes true or false, and this is {found}"),
            "write true, or false",
        );
        None
    }

    /// Profiles with their counts, as a layout in the order of the file.
    fn layout(&mut self, node: &Node) -> Option<Layout> {
        let example = "write a profile and a count on each line: \"1g.10gb\": 7; {} for no instance";
        let Kind::Map(entries) = &node.kind else {
            let what = format!("`mig-devices` takes profiles with counts, and this is {}", node.what());
            self.report(&node.span, what, example);
            return None;
        };
        let mut layout = Layout::none();
        let mut well = true;
        for (key, value) in entries {
            let (profile, count) = (self.profile(key), self.count(key, value));
            let (Some(profile), Some(count)) = (profile, count) else {
                well = false;
                if self.full() {
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
                let what = format!("with this one the group has more than {MOST_IN_ALL} instances");
                self.report(&key.span, what, "counts are those of one GPU");
                return None;
            }
            layout.entries.push(Entry { count, ..profile });
        }
        well.then_some(layout)
    }

    fn profile(&mut self, key: &Node) -> Option<Entry> {
        let text = key.text().unwrap_or_default();
        let shape = "a profile is such as 1g.10gb, 1g.10gb+me or 1c.3g.40gb";
        let read = Layout::parse(text).map(|layout| layout.entries);
        match read.as_deref() {
            Ok([entry]) if !text.contains(['@', '*', ':', ',']) => Some(entry.clone()),
            Ok(_) => {
                self.report(&key.span, format!("{} is no MIG profile", Quoted(text)), shape);
                None
            }
            Err(error) => {
                let hint = error.hint.clone().filter(|hint| hint.starts_with("did you mean"));
                let what = format!("{} is no MIG profile", Quoted(text));
                // Of a name that is one the reason says more: a compute instance of too many slices.
                let what = if hint.is_none() && text.contains("c.") { error.message.clone() } else { what };
                self.report(&key.span, what, hint.unwrap_or_else(|| shape.to_owned()));
                None
            }
        }
    }

    fn count(&mut self, key: &Node, value: &Node) -> Option<u8> {
        let name = Quoted(key.text().unwrap_or_default());
        let hint = format!("write a number from 1 to {MOST}");
        let text = match &value.kind {
            Kind::Scalar { text, plain: true } => text,
            Kind::Scalar { plain: false, .. } | Kind::List(_) | Kind::Map(_) => {
                self.report(&value.span, format!("the count of {name} is no number"), hint);
                return None;
            }
        };
        let negative = text.strip_prefix('-').is_some_and(digits);
        match text.parse::<u8>() {
            Ok(0) => {
                self.report(&value.span, format!("a count of 0 asks for no {name}"), "leave the line out");
                None
            }
            Ok(count) if digits(text) && count <= MOST => Some(count),
            Ok(_) | Err(_) => {
                let what = if negative {
                    format!("the count of {name} is below 0")
                } else if digits(text) {
                    format!("a count of {text:.8} is more {name} than a GPU can hold")
                } else {
                    format!("the count of {name} is no number: {}", Quoted(text))
                };
                self.report(&value.span, what, hint);
                None
            }
        }
    }
}

/// Whether no key is a stranger: then a missing one is worth telling too.
fn has_all_known(entries: &[yaml::Entry]) -> bool {
    entries.iter().all(|(key, _)| key.text().is_some_and(|name| TOP.contains(&name)))
}

fn digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn get<'n>(entries: &'n [yaml::Entry], name: &str) -> Option<&'n Node> {
    entries.iter().find(|(key, _)| key.text() == Some(name)).map(|(_, value)| value.as_ref())
}
