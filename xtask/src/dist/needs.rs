//! What a program needs of the host it is started on: the version of the C library, and other libraries.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::command;

/// Libraries that are part of every Linux with the GNU C library.
const EVERYWHERE: [&str; 8] = [
    "libc.so",
    "libm.so",
    "libdl.so",
    "librt.so",
    "libpthread.so",
    "libgcc_s.so",
    "ld-linux-x86-64.so",
    "ld-linux-aarch64.so",
];

/// An error that names the symbols if the file needs a C library newer than `most`, or a library that a host may
/// lack.
pub fn check(file: &Path, most: (u32, u32)) -> Result<()> {
    let symbols = objdump("-T", file)?;
    let newer: Vec<&str> =
        symbols.lines().filter(|line| version(line).is_some_and(|version| version > most)).collect();
    let name = file.display();
    ensure!(newer.is_empty(), "{name} needs a newer glibc than {}.{}:\n{}", most.0, most.1, newer.join("\n"));
    let headers = objdump("-p", file)?;
    for library in headers.lines().filter_map(|line| line.trim().strip_prefix("NEEDED")).map(str::trim) {
        let known = EVERYWHERE.iter().any(|known| library.starts_with(known));
        ensure!(known, "{name} needs {library}, which not every host has");
    }
    Ok(())
}

/// The newest version of the C library of which the file needs a symbol.
pub fn newest_glibc(file: &Path) -> Result<(u32, u32)> {
    objdump("-T", file)?.lines().filter_map(version).max().context("objdump names no version of glibc")
}

fn objdump(what: &str, file: &Path) -> Result<String> {
    command::output(Command::new("objdump").arg(what).arg(file))
        .context("objdump (binutils) shows what is needed")
}

/// The version of a symbol of the C library that another file defines.
fn version(line: &str) -> Option<(u32, u32)> {
    let version = line.split_once("*UND*")?.1.split_once("GLIBC_")?.1;
    let version = version.split(|of: char| of != '.' && !of.is_ascii_digit()).next()?;
    let mut numbers = version.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let line = "0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.9)  pipe2";
        assert_eq!(version(line), Some((2, 9)));
        assert!(version(&line.replace("2.9", "2.34")) > version(line));
        assert_eq!(version(&line.replace("2.9", "2.2.5")), Some((2, 2)));
        assert_eq!(version("0000000000000000      DF *UND*  0000000000000000              memcpy"), None);
        assert_eq!(version("00000000000a5d20 g    DF .text  000000000000001a (GLIBC_2.34)  own"), None);
    }

    #[test]
    fn what_needs_more_is_refused_with_the_symbols() {
        // This program needs some version of the C library.
        let us = std::env::current_exe().expect("its file");
        check(&us, (99, 0)).expect("no version is that high");
        let refused = check(&us, (2, 0)).expect_err("it needs more than the first version").to_string();
        assert!(refused.contains("GLIBC_2."), "{refused}");
    }
}
