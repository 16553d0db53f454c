//! Reads from the source which modules a crate has, and which paths to other modules they contain.
//!
//! A path counts if it begins with `crate`, `self` or `super`: in an import, in code, or in the arguments of a macro.
//! In the root of the crate, a path that begins with the name of a module also counts. Code that is compiled only for
//! tests is ignored.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, ImplItem, Item, Meta, Token, UseTree, Visibility, parse::Parser, punctuated::Punctuated};

/// The path of a module or of an item from the root of the crate. The path of the root itself is empty.
pub(crate) type ItemPath = Vec<String>;

/// A position in the source.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    /// Path of the file, relative to the crate's `src`.
    pub(crate) file: PathBuf,
    /// Line, counted from 1.
    pub(crate) line: usize,
}

/// A path in the source of a crate.
#[derive(Debug)]
pub(crate) struct Reference {
    /// The module that contains the path.
    pub(crate) from: ItemPath,
    /// What the path leads to.
    pub(crate) to: ItemPath,
    pub(crate) place: Position,
    /// Whether the path begins with neither `crate` nor `super`. It may then lead to another crate.
    bare: bool,
}

/// The modules of a crate, and the paths in their code.
#[derive(Debug, Default)]
pub(crate) struct CrateSource {
    /// The file of each module, relative to the crate's `src`. A module inside another module's file has the same file.
    pub(crate) files: BTreeMap<ItemPath, PathBuf>,
    /// All paths to modules and items of the crate.
    pub(crate) references: Vec<Reference>,
    /// What each re-export leads to. The key is the re-export itself.
    pub(crate) re_exports: BTreeMap<ItemPath, ItemPath>,
}

impl CrateSource {
    /// Reads the crate whose `main.rs` or `lib.rs` is in `src`.
    ///
    /// # Errors
    /// If a file cannot be read or parsed, or a module has a `#[path]`.
    pub(crate) fn read(src: &Path) -> Result<Self> {
        let mut reader = Reader { src, source: Self::default() };
        for root in ["main.rs", "lib.rs"].map(Path::new) {
            if src.join(root).exists() {
                reader.file(root, &[])?;
            }
        }
        let mut source = reader.source;
        // A bare path in the root that does not begin with a module leads to another crate.
        let modules: BTreeSet<&String> = source.files.keys().filter_map(|module| module.first()).collect();
        let leads_out = |one: &Reference| one.bare && one.to.first().is_none_or(|first| !modules.contains(first));
        let outside: Vec<bool> = source.references.iter().map(leads_out).collect();
        let mut outside = outside.into_iter();
        source.references.retain(|_| outside.next() != Some(true));
        Ok(source)
    }
}

struct Reader<'a> {
    src: &'a Path,
    source: CrateSource,
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
        self.source.files.insert(module.to_vec(), file.to_owned());
        for item in items {
            if only_for_tests(attributes(&item)) {
                continue;
            }
            match item {
                Item::Mod(item) => {
                    let mut inner = module.to_vec();
                    inner.push(item.ident.to_string());
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
                Item::Use(item) => {
                    if !matches!(item.vis, Visibility::Inherited) {
                        self.re_export(&item.tree, module, Vec::new());
                    }
                    self.tokens(item.to_token_stream(), file, module);
                }
                item => self.tokens(item.to_token_stream(), file, module),
            }
        }
        Ok(())
    }

    /// Records the names that a module re-exports. `prefix` is the path that contains the tree.
    fn re_export(&mut self, tree: &UseTree, module: &[String], mut prefix: Vec<String>) {
        let (name, last) = match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                return self.re_export(&path.tree, module, prefix);
            }
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.re_export(tree, module, prefix.clone()));
            }
            UseTree::Name(name) => (&name.ident, &name.ident),
            UseTree::Rename(rename) => (&rename.rename, &rename.ident),
            UseTree::Glob(_) => return,
        };
        if last != "self" {
            prefix.push(last.to_string());
        }
        let mut to = module.to_vec();
        for (at, name) in prefix.into_iter().enumerate() {
            match name.as_str() {
                "crate" if at == 0 => to.clear(),
                "self" if at == 0 => {}
                "super" => drop(to.pop()),
                _ => to.push(name),
            }
        }
        self.source.re_exports.insert([module, &[name.to_string()]].concat(), to);
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
                    let base = match first.to_string().as_str() {
                        "crate" => Vec::new(),
                        "self" => module.to_vec(),
                        "super" => parent(module).to_vec(),
                        _ if module.is_empty() => {
                            self.path(&tokens[at..], file, module, Vec::new(), true);
                            continue;
                        }
                        _ => continue,
                    };
                    self.path(&tokens[at + 3..], file, module, base, false);
                }
                _ => {}
            }
        }
    }

    /// Records the paths that begin with `base` and continue with these tokens.
    fn path(&mut self, rest: &[TokenTree], file: &Path, module: &[String], mut base: ItemPath, bare: bool) {
        match rest.first() {
            Some(TokenTree::Ident(name)) => {
                match name.to_string().as_str() {
                    "super" => drop(base.pop()),
                    "self" => {}
                    name => base.push(name.to_owned()),
                }
                if is_path_separator(&rest[1..]) {
                    return self.path(&rest[3..], file, module, base, bare);
                }
                let place = Position { file: file.to_owned(), line: name.span().start().line };
                self.source.references.push(Reference { from: module.to_vec(), to: base, place, bare });
            }
            Some(TokenTree::Group(group)) => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                for element in inner.split(|token| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ',')) {
                    self.path(element, file, module, base.clone(), bare);
                }
            }
            _ => {}
        }
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
    use crate::arrows::modules::ModuleGraph;

    /// Returns the dependencies in a crate that has these files, as `from to file:line`.
    fn arrows(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let source = CrateSource::read(folder.path()).unwrap();
        let shown = |((from, to), place): (&(String, String), &Position)| {
            format!("{from} {to} {}:{}", place.file.display(), place.line)
        };
        ModuleGraph::of(&source).uses.iter().map(shown).collect()
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
