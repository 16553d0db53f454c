//! Man pages from the definitions of commands. `clap_mangen` writes the options; this crate writes
//! the other sections.
//!
//! The text after a command's options (`after_help`) is already wrapped, and has this form:
//!
//! ```text
//! Prose goes into the description.        ─► DESCRIPTION, filled
//!   an indented line is kept as a line    ─►              not filled
//!
//! Exit status:                            ─► EXIT STATUS
//!   0 done   1 other                      ─►              not filled
//! ```

use std::{io, path::Path};

use clap::Command;
use clap_mangen::Man;

/// The directory of the documents, for the section FILES.
pub const DOCUMENTS: (&str, &str) = (
    "/usr/share/doc/gpush/docs",
    "Documents. A message that names docs/config.md means the file config.md in this directory",
);

/// The parts of a man page that the command line does not contain.
#[derive(Debug, Clone, Default)]
pub struct Appendix<'a> {
    /// Paths and their descriptions, for the section FILES.
    pub files: &'a [(&'a str, &'a str)],
    /// Other man pages, such as `gpushd(8)`.
    pub see_also: &'a [String],
}

/// Renders the man page `name` of a command for `section`.
///
/// # Errors
/// Fails only if writing to the memory buffer fails.
pub fn page(command: &Command, name: &str, section: &str, appendix: &Appendix<'_>) -> io::Result<Vec<u8>> {
    let mut command = command.clone();
    let usage = command.render_usage().to_string();
    let usage = usage.trim().strip_prefix("Usage:").unwrap_or(&usage).trim().to_owned();
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let version = command.get_version().unwrap_or(env!("CARGO_PKG_VERSION")).to_owned();
    let children: Vec<(String, String)> = command
        .get_subcommands()
        .filter(|one| !one.is_hide_set() && one.get_name() != "help")
        .map(|one| (one.get_name().to_owned(), one.get_about().map(ToString::to_string).unwrap_or_default()))
        .collect();

    let mut out = Vec::new();
    let man = Man::new(command).title(name).section(section).source(format!("gpush {version}")).manual("gpush");
    man.render_title(&mut out)?;
    let mut text = String::new();
    heading(&mut text, "NAME");
    text += &format!("{} \\- {}\n", plain(name), plain(&about));
    heading(&mut text, "SYNOPSIS");
    as_it_stands(&mut text, usage.lines());
    heading(&mut text, "DESCRIPTION");
    text += &format!("{}.\n", plain(&about));
    let blocks = blocks(&after);
    blocks.iter().filter(|block| block.title.is_none()).for_each(|block| write(&mut text, block));
    out.extend(text.as_bytes());
    man.render_options_section(&mut out)?;

    let mut text = String::new();
    if !children.is_empty() {
        heading(&mut text, "COMMANDS");
        terms(&mut text, children.iter().map(|(one, about)| (format!("{name}-{one}({section})"), about.as_str())));
    }
    for block in &blocks {
        if let Some(title) = block.title {
            heading(&mut text, &title.to_uppercase());
            write(&mut text, block);
        }
    }
    if !appendix.files.is_empty() {
        heading(&mut text, "FILES");
        terms(&mut text, appendix.files.iter().map(|(path, what)| ((*path).to_owned(), *what)));
    }
    if !appendix.see_also.is_empty() {
        heading(&mut text, "SEE ALSO");
        text += &format!("{}\n", plain(&appendix.see_also.join(", ")));
    }
    out.extend(text.as_bytes());
    Ok(out)
}

/// Writes the man page `name` of a program for section 1, and one page for each command of the program. Only the page of
/// the program gets the section FILES.
///
/// # Errors
/// If a file in `dir` cannot be written.
pub fn write_pages(program: Command, name: &str, files: &[(&str, &str)], dir: &Path) -> io::Result<()> {
    let mut program = program.disable_help_subcommand(true);
    program.build();
    write_page(&program, name, None, files, dir)
}

fn write_page(
    command: &Command,
    name: &str,
    parent: Option<&str>,
    files: &[(&str, &str)],
    dir: &Path,
) -> io::Result<()> {
    let see_also: Vec<String> =
        parent.map(|parent| format!("{parent}(1)")).into_iter().chain(["gpushd(8)".to_owned()]).collect();
    std::fs::write(dir.join(format!("{name}.1")), page(command, name, "1", &Appendix { files, see_also: &see_also })?)?;
    for child in command.get_subcommands().filter(|child| !child.is_hide_set()) {
        write_page(child, &format!("{name}-{}", child.get_name()), Some(name), &[], dir)?;
    }
    Ok(())
}

/// A paragraph of `after_help`. Empty lines separate paragraphs.
#[derive(Debug, PartialEq, Eq)]
struct Block<'t> {
    /// The section title: a first line of at most two words that ends with a colon.
    title: Option<&'t str>,
    lines: Vec<&'t str>,
}

fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    for part in text.split("\n\n").filter(|part| !part.trim().is_empty()) {
        let mut lines: Vec<&str> = part.lines().collect();
        let title = lines.first().and_then(|first| first.strip_suffix(':'));
        let title = title.filter(|title| title.split_whitespace().count() <= 2 && !title.starts_with(' '));
        if title.is_some() {
            lines.remove(0);
        }
        blocks.push(Block { title, lines });
    }
    blocks
}

/// Writes a block. roff fills prose, but does not change indented lines.
fn write(text: &mut String, block: &Block<'_>) {
    let indented = |line: &str| line.starts_with(' ');
    for run in block.lines.chunk_by(|a, b| indented(a) == indented(b)) {
        if indented(run[0]) {
            let margin = run.iter().map(|line| line.len() - line.trim_start().len()).min().unwrap_or_default();
            as_it_stands(text, run.iter().map(|line| &line[margin..]));
        } else {
            *text += ".PP\n";
            run.iter().for_each(|line| *text += &format!("{}\n", plain(line)));
        }
    }
}

fn heading(text: &mut String, title: &str) {
    *text += &format!(".SH \"{}\"\n", plain(title));
}

fn as_it_stands<'l>(text: &mut String, lines: impl Iterator<Item = &'l str>) {
    *text += ".PP\n.nf\n";
    lines.for_each(|line| *text += &format!("{}\n", plain(line)));
    *text += ".fi\n";
}

fn terms<'w>(text: &mut String, terms: impl Iterator<Item = (String, &'w str)>) {
    for (term, what) in terms {
        *text += &format!(".TP\n{}\n{}\n", plain(&term), plain(what));
    }
}

/// Escapes a line of text for roff.
fn plain(text: &str) -> String {
    let escaped = text.replace('\\', "\\e").replace('-', "\\-");
    // roff treats a line that starts with `.` or `'` as a request.
    if escaped.starts_with(['.', '\'']) { format!("\\&{escaped}") } else { escaped }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_after_the_help_becomes_sections_and_paragraphs() {
        let text = "Some prose\nof two lines:\n  --one\n\nExit status:\n  0 done   1 other\n\n.dot and 'quote'";
        let found = blocks(text);
        let titles: Vec<_> = found.iter().map(|block| block.title).collect();
        assert_eq!(titles, [None, Some("Exit status"), None]);
        let mut page = String::new();
        found.iter().for_each(|block| write(&mut page, block));
        assert_eq!(
            page,
            ".PP\nSome prose\nof two lines:\n.PP\n.nf\n\\-\\-one\n.fi\n.PP\n.nf\n0 done   1 other\n.fi\n.PP\n\\&.dot and 'quote'\n"
        );
    }

    #[test]
    fn page_has_its_sections_in_order() {
        let mut command = Command::new("tool").about("Does it").after_help("Environment:\n  TOOL  a path");
        command = command.arg(clap::Arg::new("file").long("file").value_name("FILE").help("A file")).version("1.2");
        command.build();
        let appendix = Appendix { files: &[("/etc/tool", "Its config")], see_also: &["other(8)".to_owned()] };
        let page = String::from_utf8(page(&command, "tool", "8", &appendix).unwrap()).unwrap();
        let mut at = 0;
        for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "ENVIRONMENT", "FILES", "SEE ALSO"] {
            let found = page.find(&format!(".SH \"{section}\"")).or_else(|| page.find(&format!(".SH {section}")));
            let found = found.unwrap_or_else(|| panic!("no {section}: {page}"));
            assert!(found > at, "{section} is not where it belongs: {page}");
            at = found;
        }
        assert!(page.contains("gpush 1.2") && page.contains("tool [OPTIONS]"), "{page}");
    }

    #[test]
    fn every_visible_command_has_a_page() {
        let child = |name: &'static str| Command::new(name).about("Does it");
        let program = Command::new("tool").subcommands([child("a").subcommand(child("b")), child("c").hide(true)]);
        let dir = tempfile::tempdir().unwrap();
        write_pages(program, "tool", &[DOCUMENTS], dir.path()).unwrap();
        let mut names: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|page| page.unwrap().file_name()).collect();
        names.sort();
        let page = std::fs::read_to_string(dir.path().join("tool.1")).unwrap();
        assert_eq!(names, ["tool-a-b.1", "tool-a.1", "tool.1"]);
        assert!(page.contains("/usr/share/doc/gpush/docs"), "{page}");
    }
}
