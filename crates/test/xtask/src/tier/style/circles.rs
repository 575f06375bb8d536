//! Circles of imports: of two modules beside each other, only one may need the other.
//!
//! Every path that begins with `crate::` or `super::` counts, in a `use` or not. Tests may import
//! anything.

use super::text_files::TextFiles;
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// Where a module or an item is, from the root of its crate.
type ItemPath = Vec<String>;

/// Modules of one folder that import each other in a circle, and what is between two circles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Circle {
    /// The crate, and the module whose children they are.
    place: String,
    /// What each of them imports of the others.
    imports: BTreeMap<String, BTreeSet<String>>,
}

impl fmt::Display for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: modules import each other in a circle:", self.place)?;
        self.imports.iter().try_for_each(|(module, imported)| {
            let imported: Vec<&str> = imported.iter().map(String::as_str).collect();
            write!(f, "\n    {module} imports {}", imported.join(", "))
        })
    }
}

/// The circles of all crates.
pub(super) fn findings(files: &TextFiles) -> Vec<Circle> {
    let mut crates: BTreeMap<&str, BTreeMap<ItemPath, String>> = BTreeMap::new();
    for (path, text) in files {
        if let Some((name, module)) = path.to_str().and_then(module_of) {
            crates.entry(name).or_default().insert(module, text.clone());
        }
    }
    crates.iter().flat_map(|(name, sources)| circles(name, sources)).collect()
}

/// The folder of the crate that a source file belongs to, and the module that it is.
fn module_of(path: &str) -> Option<(&str, ItemPath)> {
    let (name, source) =
        path.split_once("/src/").filter(|(name, _)| name.starts_with("crates/"))?;
    let module = source.strip_suffix(".rs")?.split('/').map(str::to_owned);
    Some((name, module.filter(|part| part != "lib" && part != "main").collect()))
}

fn circles(name: &str, sources: &BTreeMap<ItemPath, String>) -> Vec<Circle> {
    let tests: Vec<ItemPath> = sources.iter().flat_map(|(m, text)| test_modules(m, text)).collect();
    let product: BTreeMap<&ItemPath, Vec<ItemPath>> = sources
        .iter()
        .filter(|(module, _)| !tests.iter().any(|test| module.starts_with(test)))
        .map(|(module, text)| (module, imports(module, text)))
        .collect();
    let parents: BTreeSet<&[String]> =
        product.keys().filter_map(|m| m.split_last()).map(|(_, parent)| parent).collect();
    let circle = |parent: &[String]| {
        let imports = in_circles(siblings(parent, &product));
        let place = [&[name.to_owned()], parent].concat().join("::");
        (!imports.is_empty()).then_some(Circle { place, imports })
    };
    parents.into_iter().filter_map(circle).collect()
}

/// The modules that are declared for tests only.
fn test_modules(module: &[String], text: &str) -> Vec<ItemPath> {
    let declared = text.split("#[cfg(test)]\n").skip(1).filter_map(|rest| {
        let line = rest.lines().next()?;
        let (_, name) = line.strip_suffix(';')?.split_once("mod ")?;
        Some([module, &[name.to_owned()]].concat())
    });
    declared.collect()
}

/// What each child of `parent` imports of the others.
fn siblings(
    parent: &[String],
    product: &BTreeMap<&ItemPath, Vec<ItemPath>>,
) -> BTreeMap<String, BTreeSet<String>> {
    let child = |path: &[String]| path.strip_prefix(parent)?.first().cloned();
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (module, imported) in product {
        if let Some(name) = child(module) {
            all.entry(name).or_default().extend(imported.iter().filter_map(|path| child(path)));
        }
    }
    let names: BTreeSet<String> = all.keys().cloned().collect();
    for (name, imported) in &mut all {
        imported.retain(|other| other != name && names.contains(other));
    }
    all
}

/// Leaves those of which some import is in a circle: neither what imports nothing that is left,
/// nor what nothing that is left imports.
fn in_circles(mut left: BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    loop {
        let before = left.len();
        let imported: BTreeSet<String> = left.values().flatten().cloned().collect();
        left.retain(|name, imports| !imports.is_empty() && imported.contains(name));
        if left.len() == before {
            return left;
        }
        let names: BTreeSet<String> = left.keys().cloned().collect();
        left.values_mut().for_each(|imports| imports.retain(|name| names.contains(name)));
    }
}

/// The items that a module imports from its crate.
fn imports(module: &[String], text: &str) -> Vec<ItemPath> {
    let code: String = text
        .lines()
        .take_while(|line| !line.starts_with("mod tests {"))
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| [line, "\n"])
        .collect();
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::").chain(code.match_indices("super::")) {
        // `super::super::` is read from its first word; `$crate::` is another one's.
        let before = code[..at].chars().next_back();
        if before.is_some_and(|c| c == ':' || c == '$' || c == '_' || c.is_alphanumeric()) {
            continue;
        }
        let mut rest = &code[at..];
        let mut base = module;
        if let Some(path) = rest.strip_prefix("crate::") {
            (rest, base) = (path, &[]);
        }
        while let Some(path) = rest.strip_prefix("super::") {
            (rest, base) = (path, base.split_last().map_or(&[][..], |(_, parent)| parent));
        }
        found.extend(tree(rest).into_iter().map(|path| [base, &path].concat()));
    }
    found
}

/// The paths of a tree such as `a::{b, c::d}`.
fn tree(text: &str) -> Vec<ItemPath> {
    let text = text.trim_start();
    if let Some(group) = text.strip_prefix('{') {
        return branches(group).into_iter().flat_map(tree).collect();
    }
    let end = text.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    if name.is_empty() {
        return Vec::new();
    }
    let below = rest.strip_prefix("::").map(tree).unwrap_or_default();
    match below.is_empty() {
        true => vec![vec![name.to_owned()]],
        false => below.into_iter().map(|path| [&[name.to_owned()], &path[..]].concat()).collect(),
    }
}

/// What stands between the commas of a group whose brace has been read.
fn branches(group: &str) -> Vec<&str> {
    let (mut depth, mut begin, mut found) = (0, 0, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth > 0 => depth -= 1,
            ',' | '}' if depth == 0 => {
                found.push(&group[begin..at]);
                begin = at + 1;
                if c == '}' {
                    break;
                }
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Modules by their paths.
    fn crate_of(modules: &[(&str, &str)]) -> BTreeMap<ItemPath, String> {
        let path = |name: &str| -> ItemPath {
            name.split("::").filter(|n| !n.is_empty()).map(str::to_owned).collect()
        };
        modules.iter().map(|(name, text)| (path(name), (*text).to_owned())).collect()
    }

    fn found(modules: &[(&str, &str)]) -> Vec<String> {
        circles("x", &crate_of(modules)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_planted_circle_is_found() {
        let circle = [("", "mod a;"), ("a", "use super::b::B;"), ("b", "fn b() { crate::a::a() }")];
        let expected =
            "x: modules import each other in a circle:\n    a imports b\n    b imports a";
        assert_eq!(found(&circle), [expected]);
        let deep = [
            ("f", ""),
            ("f::a", "use super::super::{Root, f::{self, b::{C, D}}};"),
            ("f::b", "use super::a;"),
            ("g", "use crate::f::a;"),
        ];
        assert_eq!(found(&deep).len(), 1);
        assert!(found(&deep)[0].starts_with("x::f: "), "{:?}", found(&deep));
        let through_a_child = [("a::child", "use super::super::b::B;"), ("b", "use super::a;")];
        assert_eq!(found(&through_a_child).len(), 1);
    }

    #[test]
    fn what_goes_one_way_is_no_circle() {
        let one_way = [
            ("", "#[cfg(test)]\nmod world;"),
            ("a", "use super::b::B; use super::{Root, c};\n#[cfg(test)]\nmod tests {use super::d}"),
            ("b", "// super::a\nuse super::c; macro!($crate::a)"),
            ("c", "use b::A; use not_super::a;"),
            ("d", "use super::a;"),
            ("world", "use super::a; use super::b;"),
            ("b::child", "use super::super::c; use super::B;"),
        ];
        let top = found(&one_way);
        assert_eq!(top, Vec::<String>::new());
    }

    #[test]
    fn sources_are_modules_of_their_crates() {
        let (name, module) = module_of("crates/floor/x/src/a/b.rs").unwrap();
        assert_eq!((name, module), ("crates/floor/x", vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(module_of("crates/floor/x/src/lib.rs"), Some(("crates/floor/x", Vec::new())));
        assert_eq!(module_of("crates/floor/x/tests/a.rs"), None);
        assert_eq!(module_of("crates/floor/x/src/page.md"), None);
        assert_eq!(module_of("fuzz/src/a.rs"), None);
    }

    #[test]
    fn trees_of_imports_are_read() {
        let paths = |text| tree(text).iter().map(|p| p.join("::")).collect::<Vec<_>>();
        assert_eq!(paths("a::B;"), ["a::B"]);
        assert_eq!(paths("{a::{B, c::{D, E}}, f};"), ["a::B", "a::c::D", "a::c::E", "f"]);
        assert_eq!(paths("a::*;"), ["a"]);
        assert_eq!(paths("a(b)"), ["a"]);
    }
}
