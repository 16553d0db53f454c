//! The lines of a config file in which rules set their layouts, for messages about layouts that a GPU cannot have.

use toml::de::{DeTable, DeValue};

/// Returns the line of each rule's layout, or of the rule if it has no layout, in the order of the file. The first line is
/// 1.
#[must_use]
pub fn rule_lines(text: &str) -> Vec<usize> {
    let (table, _) = DeTable::parse_recoverable(text);
    let line = |at: usize| text.get(..at).unwrap_or_default().matches('\n').count() + 1;
    let rules = table.get_ref().iter().find(|(key, _)| key.get_ref() == "gpu").map(|(_, value)| value.get_ref());
    let Some(DeValue::Array(rules)) = rules else { return Vec::new() };
    let of = |rule: &toml::Spanned<DeValue<'_>>| {
        let own = match rule.get_ref() {
            DeValue::Table(keys) => keys.iter().find(|(key, _)| key.get_ref() == "layout").map(|(key, _)| key.span()),
            _ => None,
        };
        line(own.unwrap_or_else(|| rule.span()).start)
    };
    rules.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_have_the_lines_of_their_layouts() {
        let text = "# lab\n[[gpu]]\nmatch = \"0\"\nmode = \"mig\"\nlayout = \"none\"\n\n[[gpu]]\nmatch = \"1\"\nmode = \"mps\"\n";
        assert_eq!(rule_lines(text), [5, 7]);
        assert_eq!(rule_lines("gpu = [{ match = \"0\",\n layout = \"none\" }]\n"), [2]);
        assert_eq!(rule_lines(""), [0; 0]);
    }
}
