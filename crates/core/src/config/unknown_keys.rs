//! Reports keys that the config does not have, with the key or the table that the author probably meant.

use toml::de::{DeTable, DeValue};

use super::{
    reader::Reader,
    schema::{FORMER_KEYS, MISPLACED_WORDS, OTHER_WORDS, SECTIONS, Section},
};
use crate::{diagnostic::Problem, nearest::nearest, quote::Quoted};

impl Reader<'_> {
    /// Reports keys that do not belong to the section. Returns the known keys that the author
    /// probably meant. `tables` are the tables that the section may contain.
    pub(super) fn report_unknown_keys(
        &mut self,
        table: &DeTable<'_>,
        section: Section,
        tables: &[&str],
    ) -> Vec<String> {
        let mut meant_keys = Vec::new();
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            if section.keys.contains(&name) || tables.contains(&name) {
                continue;
            }
            let is_table = matches!(value.get_ref(), DeValue::Table(_));
            let place = if section.header.is_empty() {
                "at the top of the file".to_owned()
            } else {
                format!("in {}", section.header)
            };
            let what = if is_table && section.header.is_empty() { "table" } else { "key" };
            let known = section.keys.iter().chain(tables).copied();
            // `ALLOW` is the only section that SECTIONS does not contain. It describes one entry of
            // `processes.allow`, so do not suggest that the keys of such an entry belong to another
            // table.
            let listed = !SECTIONS.iter().any(|own| own.header == section.header);
            let elsewhere: Vec<&Section> =
                SECTIONS.iter().filter(|other| other.keys.contains(&name) && !listed).collect();
            // `[mps]` has settings of all daemons, and `[gpu.mps]` those of a rule.
            let elsewhere = match elsewhere.iter().find(|other| other.key() == section.key()) {
                Some(same) => vec![*same],
                None => elsewhere,
            };
            let within: Vec<String> = SECTIONS
                .iter()
                .filter(|inner| tables.contains(&inner.key()) && inner.keys.contains(&name))
                .filter(|inner| inner.table() == format!("{}.{}", section.table(), inner.key()))
                .map(|inner| format!("`{} = {{ {name} = … }}`", inner.key()))
                .collect();
            let former = MISPLACED_WORDS
                .iter()
                .chain(FORMER_KEYS)
                .find(|(header, keys, _)| *header == section.header && keys.contains(&name));
            let other =
                OTHER_WORDS.iter().find(|(header, words, _)| *header == section.header && words.contains(&name));
            let hint = if let Some((_, _, hint)) = former {
                (*hint).to_owned()
            } else if let Some((_, _, meant)) = other {
                meant_keys.push((*meant).to_owned());
                format!("did you mean `{meant}`?")
            } else if !within.is_empty() {
                format!("write `{name}` inside this table: {}", within.join(" or "))
            } else if !elsewhere.is_empty() {
                let places: Vec<String> = elsewhere.iter().map(|other| place_of(other)).collect();
                match nearest(name, known.clone()) {
                    Some(meant) => {
                        meant_keys.push(meant.to_owned());
                        format!("did you mean `{meant}`? Or move `{name}` to {}", places.join(" or "))
                    }
                    None => format!("move `{name}` to {}", places.join(" or ")),
                }
            } else if let Some(meant) = nearest(name, known.clone()) {
                meant_keys.push(meant.to_owned());
                format!("did you mean `{meant}`?")
            } else {
                format!("write one of: {}", known.collect::<Vec<_>>().join(", "))
            };
            self.report(Problem::new(key.span(), format!("unknown {what} {} {place}", Quoted(name)), hint));
        }
        meant_keys
    }
}

/// Returns where to write a key of a table.
fn place_of(section: &Section) -> String {
    match section.header {
        "" => "the top of the file".to_owned(),
        // TOML adds such a table to the last [[gpu]] above it.
        header if header.starts_with("[gpu.") => format!("{header} below the [[gpu]] rule that it belongs to"),
        header => header.to_owned(),
    }
}
