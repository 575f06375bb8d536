//! The modules of the crate import each other without circles.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The modules that each module imports.
fn imports() -> BTreeMap<String, BTreeSet<String>> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(sources).expect("the sources") {
        let path = entry.expect("a directory that was just opened").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned();
        if path.is_dir() || name == "lib" || name == "tests" {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a source file");
        // Tests may import anything.
        let product = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        let code = product.lines().filter(|line| !line.trim_start().starts_with("//"));
        let imported = code.flat_map(|line| line.split("super::").skip(1)).map(|path| {
            path.chars().take_while(|c| *c == '_' || c.is_ascii_alphanumeric()).collect()
        });
        all.insert(name, imported.collect());
    }
    all
}

#[test]
fn modules_import_each_other_without_circles() {
    let mut left = imports();
    assert!(left["write"].contains("volume"), "imports are found: {:?}", left["write"]);
    // What imports nothing that is left is in no circle.
    loop {
        let names: BTreeSet<String> = left.keys().cloned().collect();
        left.retain(|_, imported| !imported.is_disjoint(&names));
        if left.len() == names.len() {
            break;
        }
    }
    assert!(left.is_empty(), "circles, and what imports them: {left:#?}");
}
