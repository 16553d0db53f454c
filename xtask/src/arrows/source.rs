//! Reads from the source which top-level modules a crate has, and which of them each module uses.
//!
//! A module counts as a user of another module if its code contains a path to the other module that
//! begins with `crate` or `super`: in an import, in code, or in the arguments of a macro. In the
//! root of the crate, a path that begins with the name of a module also counts. The root itself is
//! the module [`ROOT`]. Code that is compiled only for tests is ignored.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, ImplItem, Item, Meta, Token, parse::Parser, punctuated::Punctuated};

/// The name of the crate's root, `main.rs`, in the list of modules.
pub(crate) const ROOT: &str = "main";

/// Where in the source a module uses another module.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    /// Path of the file, relative to the crate's `src`.
    pub(crate) file: PathBuf,
    /// Line, counted from 1.
    pub(crate) line: usize,
}

/// The modules of a crate, and the dependencies between them.
#[derive(Debug, Default)]
pub(crate) struct CrateSource {
    /// Names of the top-level modules, including [`ROOT`].
    pub(crate) modules: BTreeSet<String>,
    /// For each dependency, its first position. The key is the using module and the used module.
    pub(crate) uses: BTreeMap<(String, String), Position>,
}

/// Reads the crate whose `main.rs` is in `src`.
///
/// # Errors
/// If a file cannot be read or parsed, or a module has a `#[path]`.
pub(crate) fn read(src: &Path) -> Result<CrateSource> {
    let mut reader = Reader { src, modules: BTreeSet::from([ROOT.to_owned()]), found: Vec::new() };
    reader.file(Path::new("main.rs"), &[])?;
    let mut uses = BTreeMap::new();
    for Found { from, name, place, bare } in reader.found {
        // If a name in the root is not a module, it is an item or a macro of the root.
        let to = match reader.modules.contains(&name) {
            true => name,
            false if bare => continue,
            false => ROOT.to_owned(),
        };
        if from != to {
            uses.entry((from, to))
                .and_modify(|first: &mut Position| *first = place.clone().min(first.clone()))
                .or_insert(place);
        }
    }
    Ok(CrateSource { modules: reader.modules, uses })
}

/// A path in the source that leads to a name in the crate's root.
struct Found {
    from: String,
    name: String,
    place: Position,
    /// Whether the path begins with neither `crate` nor `super`. The name may then belong to
    /// another crate.
    bare: bool,
}

struct Reader<'a> {
    src: &'a Path,
    modules: BTreeSet<String>,
    found: Vec<Found>,
}

impl Reader<'_> {
    /// Reads the file of the module whose path is `module`. For the root module, the path is empty.
    fn file(&mut self, file: &Path, module: &[String]) -> Result<()> {
        let path = self.src.join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let parsed = syn::parse_file(&text).with_context(|| format!("cannot parse {}", path.display()))?;
        self.items(parsed.items, file, module)
    }

    fn items(&mut self, items: Vec<Item>, file: &Path, module: &[String]) -> Result<()> {
        for item in items {
            if only_for_tests(attributes(&item)) {
                continue;
            }
            match item {
                Item::Mod(item) => {
                    let mut inner = module.to_vec();
                    inner.push(item.ident.to_string());
                    if module.is_empty() {
                        self.modules.insert(item.ident.to_string());
                    }
                    if item.attrs.iter().any(|attribute| attribute.path().is_ident("path")) {
                        bail!(
                            "{}: module {} has a #[path], which this check does not follow",
                            file.display(),
                            item.ident
                        );
                    }
                    match item.content {
                        Some((_, items)) => self.items(items, file, &inner)?,
                        None => self.file(&self.file_of(&inner)?, &inner)?,
                    }
                }
                Item::Impl(mut item) => {
                    item.items.retain(|item| !only_for_tests(attributes_in_impl(item)));
                    self.tokens(item.to_token_stream(), file, module);
                }
                item => self.tokens(item.to_token_stream(), file, module),
            }
        }
        Ok(())
    }

    fn file_of(&self, module: &[String]) -> Result<PathBuf> {
        let folder: PathBuf = module.iter().collect();
        let candidates = [folder.with_extension("rs"), folder.join("mod.rs")];
        let found = candidates.into_iter().find(|file| self.src.join(file).exists());
        found.with_context(|| format!("module {} has no file below {}", module.join("::"), self.src.display()))
    }

    fn tokens(&mut self, tokens: TokenStream, file: &Path, module: &[String]) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Group(group) => self.tokens(group.stream(), file, module),
                TokenTree::Ident(first) if is_path_separator(&tokens[at + 1..]) && !follows_path(&tokens[..at]) => {
                    let rest = &tokens[at + 3..];
                    match first.to_string().as_str() {
                        "crate" => self.path(rest, file, module, &[]),
                        "self" => self.path(rest, file, module, module),
                        "super" => self.path(rest, file, module, parent(module)),
                        _ if module.is_empty() => self.record(first, file, module, true),
                        _ => {}
                    }
                }
                _ => {}
            }
        }
    }

    /// Reads the tokens after `crate::`, `self::` or `super::`. This prefix refers to the module
    /// `base`.
    fn path(&mut self, rest: &[TokenTree], file: &Path, module: &[String], base: &[String]) {
        match rest.first() {
            Some(TokenTree::Ident(name)) if name == "super" && is_path_separator(&rest[1..]) => {
                self.path(&rest[3..], file, module, parent(base));
            }
            Some(TokenTree::Ident(name)) if base.is_empty() => self.record(name, file, module, false),
            Some(TokenTree::Group(group)) => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                for element in inner.split(|token| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ',')) {
                    self.path(element, file, module, base);
                }
            }
            _ => {}
        }
    }

    fn record(&mut self, name: &Ident, file: &Path, module: &[String], bare: bool) {
        let from = module.first().map_or(ROOT, String::as_str).to_owned();
        let place = Position { file: file.to_owned(), line: name.span().start().line };
        self.found.push(Found { from, name: name.to_string(), place, bare });
    }
}

fn parent(module: &[String]) -> &[String] {
    &module[..module.len().saturating_sub(1)]
}

fn is_colon(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == ':')
}

/// Returns whether the tokens begin with `::`.
fn is_path_separator(tokens: &[TokenTree]) -> bool {
    matches!(tokens, [first, second, ..] if is_colon(first) && is_colon(second))
}

/// Returns whether the tokens end with `::`. The next identifier then continues a path.
fn follows_path(tokens: &[TokenTree]) -> bool {
    matches!(tokens, [.., first, second] if is_colon(first) && is_colon(second))
}

/// Returns whether an attribute limits the item to test builds: `#[test]`, `#[cfg(test)]`,
/// `#[cfg(all(test, …))]`.
fn only_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg") && attribute.parse_args::<Meta>().is_ok_and(|meta| requires_test(&meta))
    })
}

fn requires_test(condition: &Meta) -> bool {
    match condition {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) => {
            let inner = Punctuated::<Meta, Token![,]>::parse_terminated.parse2(list.tokens.clone()).unwrap_or_default();
            match list.path.get_ident().map(ToString::to_string).as_deref() {
                Some("all") => inner.iter().any(requires_test),
                Some("any") => !inner.is_empty() && inner.iter().all(requires_test),
                _ => false,
            }
        }
        Meta::NameValue(_) => false,
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn attributes_in_impl(item: &ImplItem) -> &[Attribute] {
    match item {
        ImplItem::Const(item) => &item.attrs,
        ImplItem::Fn(item) => &item.attrs,
        ImplItem::Type(item) => &item.attrs,
        ImplItem::Macro(item) => &item.attrs,
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the dependencies in a crate that has these files, as `from to file:line`.
    fn arrows(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let source = read(folder.path()).unwrap();
        let shown = |((from, to), place): (&(String, String), &Position)| {
            format!("{from} {to} {}:{}", place.file.display(), place.line)
        };
        source.uses.iter().map(shown).collect()
    }

    const ROOT_OF_THREE: &str = "mod a;\nmod b;\nmod c;\n";

    #[test]
    fn imports_nested_braces_are_followed() {
        let a = "use std::fmt;\nuse crate::{\n    b::{self, x::{y, z}},\n    c as d,\n};\n";
        assert_eq!(
            arrows(&[("main.rs", ROOT_OF_THREE), ("a.rs", a), ("b.rs", ""), ("c.rs", "")]),
            ["a b a.rs:3", "a c a.rs:4"]
        );
    }

    #[test]
    fn paths_in_code_types_and_macros_count() {
        let a = "fn f(x: &crate::b::X) {}\nfn g() { println!(\"{}\", vec![crate::c::y()].len()); }\n";
        assert_eq!(
            arrows(&[("main.rs", ROOT_OF_THREE), ("a.rs", a), ("b.rs", ""), ("c.rs", "")]),
            ["a b a.rs:1", "a c a.rs:2"]
        );
    }

    #[test]
    fn super_is_resolved_by_the_depth_of_the_module() {
        let files = [
            ("main.rs", ROOT_OF_THREE),
            (
                "a/mod.rs",
                "mod inner;\nuse super::b;\nmod inline { use super::super::c::X; use super::own; }\nfn own() {}\n",
            ),
            ("a/inner.rs", "use super::own;\nuse super::super::b::Y;\n"),
            ("b.rs", "use super::{c::Z, super_name};\nuse self::inside::W;\nmod inside { pub struct W; }\n"),
            ("c.rs", ""),
        ];
        assert_eq!(arrows(&files), ["a b a/inner.rs:2", "a c a/mod.rs:3", "b c b.rs:1", "b main b.rs:1"]);
    }

    #[test]
    fn test_code_does_not_count() {
        let a = "#[cfg(test)]\nmod tests { use crate::b::X; }\n#[cfg(all(test, unix))]\nuse crate::b;\n\
                 struct A;\nimpl A {\n    #[cfg(test)]\n    fn f() { crate::b::g() }\n    #[cfg(not(test))]\n    fn f() { crate::c::g() }\n}\n";
        let files = [
            ("main.rs", "mod a;\nmod b;\nmod c;\n#[cfg(test)]\nmod planted;\n"),
            ("a.rs", a),
            ("b.rs", ""),
            ("c.rs", ""),
        ];
        assert_eq!(arrows(&files), ["a c a.rs:10"]);
    }

    #[test]
    fn root_uses_modules_by_bare_names() {
        let main =
            "mod a;\nmod b;\nuse std::fmt;\nfn main() { a::run(std::env::args()); }\npub(crate) const LIMIT: u8 = 1;\n";
        let a = "use crate::LIMIT;\nmod b { pub fn x() {} }\nfn y() { b::x() }\n";
        assert_eq!(arrows(&[("main.rs", main), ("a.rs", a), ("b.rs", "")]), ["a main a.rs:1", "main a main.rs:4"]);
    }
}
