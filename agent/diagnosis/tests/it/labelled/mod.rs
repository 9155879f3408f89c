//! Labelled failures for the tests of attribution, and the catalog to judge them with.

#![allow(dead_code, reason = "each test uses what it needs")]

use std::path::PathBuf;

use mainstay_diagnosis::attribution::catalog::Catalog;
use mainstay_diagnosis::attribution::score::Case;

/// The built-in catalog, or the one in the directory `CATALOG`, to try out signatures.
pub fn catalog() -> &'static Catalog {
    let Some(dir) = std::env::var_os("CATALOG") else {
        return Catalog::built_in().expect("a valid catalog");
    };
    let files: Vec<(String, String)> = std::fs::read_dir(dir)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "toml"))
        .map(|path| {
            let text = std::fs::read_to_string(&path).expect("a readable file");
            (path.display().to_string(), text)
        })
        .collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    Box::leak(Box::new(Catalog::read(&files).expect("a valid catalog")))
}

/// The labelled cases in `shared/` next to the repository, or in the file or folder `MAINSTAY_LABELLED_CASES`.
pub fn labelled() -> Option<Vec<Case>> {
    let named = std::env::var_os("MAINSTAY_LABELLED_CASES").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/attribution"),
        PathBuf::from,
    );
    let file = if named.is_dir() { named.join("dev.jsonl") } else { named };
    let Ok(text) = std::fs::read_to_string(&file) else {
        testing::skip(&format!(
            "no labelled cases at {}; MAINSTAY_LABELLED_CASES names others",
            file.display()
        ));
        return None;
    };
    let cases = text.lines().filter(|line| !line.is_empty());
    Some((1..).zip(cases).map(|(number, line)| Case::read(number, line)).collect())
}
