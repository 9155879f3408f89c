//! The cells: `tests/healthy/faults/faults.json`, and how its faults and programs are paired.

use std::collections::BTreeMap;
use std::str::FromStr;

use mainstay_model::verdict::FaultDomain;
use serde::Deserialize;

use crate::bench::prelude::*;

/// Steps after which a fault happens.
const MOMENTS: [u64; 3] = [0, 5, 200];

#[derive(Clone, Debug, Deserialize)]
pub struct Fault {
    /// Its name, that of the function in `fault.py`.
    pub name: String,
    /// The signal that is sent from outside.
    pub signal: Option<i32>,
    /// The right domains. Empty: any named domain is wrong.
    pub domains: Vec<FaultDomain>,
    /// The right decisions: restart, stop, hand_back.
    pub decisions: Vec<String>,
    /// Whether the cause is visible, so that an abstention is an error.
    pub shows: bool,
    #[serde(default)]
    pub mounts: bool,
    /// No process ends: the hang must be detected.
    #[serde(default)]
    pub hang: bool,
    #[serde(default)]
    pub torch: bool,
    #[serde(default)]
    pub distributed: bool,
    /// It happens to all ranks alike.
    #[serde(default)]
    pub any_rank: bool,
}

/// A program and how it is run.
#[derive(Clone, Debug, Deserialize)]
pub struct Program {
    /// Its file's name without the ending.
    pub name: String,
    pub ranks: u32,
    #[serde(default)]
    pub torch: bool,
    #[serde(default)]
    pub distributed: bool,
    #[serde(default = "yes")]
    pub client: bool,
    /// It runs behind a shell script.
    #[serde(default)]
    pub shell: bool,
    /// A module without which it cannot run.
    pub needs: Option<String>,
    #[serde(default)]
    pub arguments: Vec<String>,
    #[serde(default)]
    pub variables: BTreeMap<String, String>,
    #[serde(skip)]
    pub place: usize,
}

impl Program {
    /// Whether the calibration of live verdicts was chosen without it: it used the programs at even places.
    pub fn is_held_out(&self) -> bool {
        self.place % 2 == 1
    }
}

fn yes() -> bool {
    true
}

/// A fault in a program at a moment.
#[derive(Clone, Debug)]
pub struct Cell {
    pub fault: Fault,
    pub program: Program,
    /// The step after which it happens.
    pub after: u64,
    /// With an unrelated warning just before.
    pub warning: bool,
}

impl Cell {
    pub fn name(&self) -> String {
        let way = if self.program.shell { "+shell" } else { "" };
        let client = if self.program.client { "" } else { "-client" };
        let warning = if self.warning { "+warning" } else { "" };
        format!("{}/{}{way}{client}@{}{warning}", self.fault.name, self.program.name, self.after)
    }

    /// The rank of the fault: the last one.
    pub fn rank(&self) -> u32 {
        self.program.ranks.saturating_sub(1)
    }
}

/// One part of several of the table, written `2/4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The number of the part, from 0.
    number: usize,
    of: usize,
}

impl FromStr for Part {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Part> {
        let (number, of) = text.split_once('/').context("a part of several is written 2/4")?;
        let (number, of): (usize, usize) = (number.parse()?, of.parse()?);
        ensure!((1..=of).contains(&number), "part {number} of {of}: parts count from 1 to {of}");
        Ok(Part { number: number - 1, of })
    }
}

/// All faults and programs.
#[derive(Debug, Deserialize)]
pub struct Table {
    faults: Vec<Fault>,
    programs: Vec<Program>,
}

impl Table {
    pub fn read() -> Result<Table> {
        let path = paths::root().join("tests/healthy/faults/faults.json");
        let mut table: Table =
            serde_json::from_str(&fs::read_to_string(path)?).context("the table of faults")?;
        for (place, program) in table.programs.iter_mut().enumerate() {
            program.place = place;
        }
        Ok(table)
    }

    /// Each fault with each program that it can happen to, at moments that take turns; each fault once more with
    /// a warning before.
    pub fn cells(&self) -> Vec<Cell> {
        self.part(Part { number: 0, of: 1 })
    }

    /// Those of a part: the pairs of faults and programs take turns, so that each part has every fault and every
    /// program. The cells with a warning are in the first part.
    pub fn part(&self, part: Part) -> Vec<Cell> {
        let mut cells = Vec::new();
        for (place, fault) in self.faults.iter().enumerate() {
            let fitting: Vec<(usize, &Program)> =
                self.programs.iter().enumerate().filter(|(_, program)| fits(fault, program)).collect();
            for (at, program) in fitting.iter().filter(|(at, _)| (place + at) % part.of == part.number) {
                let after = MOMENTS[(place + at) % MOMENTS.len()];
                cells.push(cell(fault, program, after, false));
            }
            let warned = fitting.get(place % fitting.len().max(1)).filter(|_| part.number == 0);
            if let Some((_, program)) = warned {
                cells.push(cell(fault, program, 5, true));
            }
        }
        cells
    }

    /// One cell of each fault, over programs that start quickly.
    pub fn sample(&self) -> Vec<Cell> {
        let quick: Vec<&Program> = self.programs.iter().filter(|program| program.needs.is_none()).collect();
        let mut cells = Vec::new();
        for (place, fault) in self.faults.iter().enumerate() {
            let fitting: Vec<&&Program> = quick.iter().filter(|program| fits(fault, program)).collect();
            if let Some(program) = fitting.get(place % fitting.len().max(1)) {
                cells.push(cell(fault, program, MOMENTS[place % 2], place % 4 == 1));
            }
        }
        cells
    }
}

fn cell(fault: &Fault, program: &Program, after: u64, warning: bool) -> Cell {
    Cell { fault: fault.clone(), program: program.clone(), after, warning }
}

fn fits(fault: &Fault, program: &Program) -> bool {
    (program.torch || !fault.torch) && (program.distributed || !fault.distributed)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_fault_meets_every_program_that_it_can_happen_to() {
        let table = Table::read().expect("a sound table");
        assert!(table.faults.len() >= 25 && table.programs.len() == 20);
        let cells = table.cells();
        assert!(cells.len() >= 500, "{} cells", cells.len());
        for fault in &table.faults {
            let its: Vec<&Cell> = cells.iter().filter(|cell| cell.fault.name == fault.name).collect();
            assert_eq!(its.iter().filter(|cell| cell.warning).count(), 1, "{}", fault.name);
            for after in MOMENTS {
                assert!(its.iter().any(|cell| cell.after == after), "{} after {after} steps", fault.name);
            }
        }
        assert_eq!(table.sample().len(), table.faults.len());
    }

    #[test]
    fn the_parts_together_are_the_table_and_each_has_every_fault_and_program() {
        let table = Table::read().expect("a sound table");
        let parts: Vec<Vec<Cell>> =
            ["1/4", "2/4", "3/4", "4/4"].map(|part| table.part(part.parse().expect("a part"))).into();
        let names = |cells: &[Cell]| cells.iter().map(Cell::name).collect::<BTreeSet<_>>();
        let together: BTreeSet<String> = parts.iter().flat_map(|cells| names(cells)).collect();
        assert_eq!(together, names(&table.cells()));
        for cells in &parts {
            assert!(table.faults.iter().all(|fault| cells.iter().any(|cell| cell.fault.name == fault.name)));
            assert!(table.programs.iter().all(|of| cells.iter().any(|cell| cell.program.name == of.name)));
        }
        assert!(
            "0/4".parse::<Part>().is_err() && "5/4".parse::<Part>().is_err() && "x".parse::<Part>().is_err()
        );
    }
}
