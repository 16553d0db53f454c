//! The table of the agent's modules in ARCHITECTURE.md.
//!
//! ```text
//! | layer | module | uses |
//! |---|---|---|
//! | main | `main` | `http`, `state` |
//! |      | `http` | `state` |
//! ```
//!
//! The layers are for readers only. The order of the rows matters: a module may use only modules in
//! lower rows.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};

/// First line of the table.
const HEADER: &str = "| layer | module | uses |";

/// A row: a module, and the modules that it uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    layer: String,
    /// Name of the module.
    pub(crate) module: String,
    /// Names of the modules that this module uses.
    pub(crate) uses: BTreeSet<String>,
}

/// The table of modules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Table {
    /// The rows, from the highest layer to the lowest.
    pub(crate) rows: Vec<Row>,
}

impl Table {
    /// Finds the table in a Markdown text.
    ///
    /// # Errors
    /// If there is no such table, a row has another form, or a module has two rows.
    pub(crate) fn find(text: &str) -> Result<Self> {
        let rows = lines_of_table(text)?.map(|line| row(line).with_context(|| format!("in the row `{line}`")));
        let rows = rows.collect::<Result<Vec<_>>>()?;
        let mut seen = BTreeSet::new();
        if let Some(row) = rows.iter().find(|row| !seen.insert(&row.module)) {
            bail!("module {} has two rows", row.module);
        }
        Ok(Self { rows })
    }

    /// Returns the text, with its table replaced by this table.
    ///
    /// # Errors
    /// If the text has no such table.
    pub(crate) fn replace_in(&self, text: &str) -> Result<String> {
        let old: Vec<&str> = lines_of_table(text)?.collect();
        let mut new = String::new();
        for row in &self.rows {
            let uses: Vec<String> = row.uses.iter().map(|name| format!("`{name}`")).collect();
            let cells = [row.layer.as_str(), &format!("`{}`", row.module), &uses.join(", ")];
            let cells: Vec<String> =
                cells.iter().map(|cell| if cell.is_empty() { " ".to_owned() } else { format!(" {cell} ") }).collect();
            new += &format!("|{}|\n", cells.join("|"));
        }
        let old: String = old.iter().flat_map(|line| [line, "\n"]).collect();
        Ok(text.replacen(&old, &new, 1))
    }

    /// Returns the position of a module's row, counted from the top.
    pub(crate) fn rank(&self, module: &str) -> Option<usize> {
        self.rows.iter().position(|row| row.module == module)
    }
}

fn lines_of_table(text: &str) -> Result<impl Iterator<Item = &str>> {
    let mut lines = text.lines().skip_while(|line| *line != HEADER);
    lines.next().with_context(|| format!("no table with the header `{HEADER}`"))?;
    Ok(lines.skip(1).take_while(|line| line.starts_with('|')))
}

fn row(line: &str) -> Result<Row> {
    let cells: Vec<&str> = line.split('|').map(str::trim).collect();
    let [_, layer, module, uses, _] = cells[..] else { bail!("a row has three cells: layer, module, uses") };
    let module = name(module)?;
    let uses = uses.split(',').map(str::trim).filter(|cell| !cell.is_empty()).map(name).collect::<Result<_>>()?;
    Ok(Row { layer: layer.to_owned(), module, uses })
}

fn name(cell: &str) -> Result<String> {
    let inner = cell.strip_prefix('`').and_then(|rest| rest.strip_suffix('`'));
    let inner = inner.filter(|name| !name.is_empty() && !name.contains('`'));
    Ok(inner.with_context(|| format!("`{cell}` is not the name of a module in backticks"))?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# A\n\n| layer | module | uses |\n|---|---|---|\n| top | `main` | `a`, `b` |\n| | `a` | `b` |\n\
                        | low | `b` | |\n\nAfter.\n";

    #[test]
    fn table_is_found_and_written_back_unchanged() {
        let table = Table::find(TEXT).unwrap();
        assert_eq!(table.rows.len(), 3);
        assert_eq!(table.rank("b"), Some(2));
        assert_eq!(table.rows[0].uses, BTreeSet::from(["a".to_owned(), "b".to_owned()]));
        assert_eq!(table.replace_in(TEXT).unwrap(), TEXT);
    }

    #[test]
    fn changed_table_row_is_written() {
        let mut table = Table::find(TEXT).unwrap();
        table.rows[1].uses.clear();
        assert_eq!(table.replace_in(TEXT).unwrap(), TEXT.replace("| | `a` | `b` |", "| | `a` | |"));
    }

    #[test]
    fn rows_of_another_form_are_errors() {
        assert!(Table::find("# A\n").is_err());
        for wrong in ["| top | main | |", "| top | `b` | |", "| top | `x` | y |", "| `x` | |"] {
            let text = TEXT.replace("| top | `main` | `a`, `b` |", wrong);
            assert!(Table::find(&text).is_err(), "{wrong}");
        }
    }
}
