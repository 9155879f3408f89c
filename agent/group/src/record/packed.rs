//! Packs the seats of a large job: a value of the coordination store must be smaller than etcd's request limit of 1.5
//! MiB, and 12,500 seats as JSON are 4.4 MiB.
//!
//! Each column is one string with the values of all hosts in the order of seats. Each value starts with the number of
//! letters it shares with the one before (one digit of base 36), and ends with a space. A value that starts with the
//! host's name or address has `=` in its place.

use serde::{Deserialize, Serialize};

use crate::round::{Member, Seated, seated};

/// Fewer seats are stored unpacked, so that launchers of earlier versions can read them.
const FROM: usize = 512;

/// The separator between values.
const END: char = ' ';

/// Replaces the host's name or address, and escapes values that start with such a character.
const SAME: char = '=';
const OTHER: char = '~';

/// The columns.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Packed {
    hosts: String,
    launchers: String,
    node_ranks: String,
    ranks: String,
    addresses: String,
    replicas: String,
    listens: String,
    domains: String,
    /// `l` for the leader, `m` for a launcher that can get other ranks, `p` for one that can prepare as a spare.
    flags: String,
    /// Empty if no host is implicated.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    implicated: String,
}

impl Packed {
    /// Packs the seats. `None` for a job that is not large, and for names that cannot be packed.
    pub(super) fn from_seats(seats: &[Seated]) -> Option<Packed> {
        let members = || seats.iter().map(|at| &at.member);
        if seats.len() < FROM || seated(members().cloned().collect()) != seats {
            return None;
        }
        let column = |of: &dyn Fn(&Member) -> String| packed(members().map(of));
        let flags = |member: &Member| {
            let flag = |is: bool, name: &'static str| if is { name } else { "" };
            format!("{}{}{}", flag(member.leads, "l"), flag(member.moves, "m"), flag(member.prepares, "p"))
        };
        Some(Packed {
            hosts: column(&|member| member.host.clone())?,
            launchers: column(&|member| relative(&member.launcher, &member.host))?,
            node_ranks: column(&|member| member.node_rank.map(|rank| rank.to_string()).unwrap_or_default())?,
            ranks: column(&|member| member.ranks.to_string())?,
            addresses: column(&|member| member.address.clone())?,
            replicas: column(&|member| relative(&member.replicas, &member.address))?,
            listens: column(&|member| relative(&member.listens, &member.address))?,
            domains: column(&|member| member.domain.clone())?,
            flags: column(&flags)?,
            implicated: match members().any(|member| member.implicated > 0) {
                true => column(&|member| member.implicated.to_string())?,
                false => String::new(),
            },
        })
    }

    /// Unpacks the seats.
    pub(super) fn seats(&self) -> Result<Vec<Seated>, String> {
        let hosts = unpacked(&self.hosts)?;
        let column = |name: &str, column: &str| {
            let values = unpacked(column)?;
            let fits = values.len() == hosts.len();
            fits.then_some(values).ok_or_else(|| format!("{name}: not as many as hosts"))
        };
        let (launchers, node_ranks) =
            (column("launchers", &self.launchers)?, column("node_ranks", &self.node_ranks)?);
        let (ranks, addresses) = (column("ranks", &self.ranks)?, column("addresses", &self.addresses)?);
        let (replicas, listens) = (column("replicas", &self.replicas)?, column("listens", &self.listens)?);
        let (domains, flags) = (column("domains", &self.domains)?, column("flags", &self.flags)?);
        let implicated = match self.implicated.as_str() {
            "" => vec!["0".to_owned(); hosts.len()],
            some => column("implicated", some)?,
        };
        let number = |text: &str| text.parse::<u32>().map_err(|error| format!("{text}: {error}"));
        let member = |at: usize| {
            let cell = |column: &[String]| column.get(at).cloned().unwrap_or_default();
            let (host, address, node_rank) = (cell(&hosts), cell(&addresses), cell(&node_ranks));
            Ok(Member {
                launcher: absolute(&cell(&launchers), &host),
                node_rank: if node_rank.is_empty() { None } else { Some(number(&node_rank)?) },
                ranks: number(&cell(&ranks))?,
                replicas: absolute(&cell(&replicas), &address),
                listens: absolute(&cell(&listens), &address),
                leads: cell(&flags).contains('l'),
                moves: cell(&flags).contains('m'),
                prepares: cell(&flags).contains('p'),
                implicated: number(&cell(&implicated))?,
                domain: cell(&domains),
                host,
                address,
            })
        };
        Ok(seated((0..hosts.len()).map(member).collect::<Result<Vec<Member>, String>>()?))
    }
}

fn relative(value: &str, to: &str) -> String {
    match value.strip_prefix(to).filter(|_| !to.is_empty()) {
        Some(rest) => format!("{SAME}{rest}"),
        None if value.starts_with([SAME, OTHER]) => format!("{OTHER}{value}"),
        None => value.to_owned(),
    }
}

fn absolute(value: &str, to: &str) -> String {
    match (value.strip_prefix(SAME), value.strip_prefix(OTHER)) {
        (Some(rest), _) => format!("{to}{rest}"),
        (_, Some(rest)) => rest.to_owned(),
        _ => value.to_owned(),
    }
}

/// `None` if a value contains a space.
fn packed(values: impl Iterator<Item = String>) -> Option<String> {
    let (mut all, mut before) = (String::new(), String::new());
    for value in values {
        if value.contains(END) {
            return None;
        }
        let same = value.chars().zip(before.chars()).take(35).take_while(|(one, other)| one == other).count();
        all.push(char::from_digit(u32::try_from(same).ok()?, 36)?);
        all.extend(value.chars().skip(same));
        all.push(END);
        before = value;
    }
    Some(all)
}

fn unpacked(all: &str) -> Result<Vec<String>, String> {
    let mut values: Vec<String> = Vec::new();
    for coded in all.split_terminator(END) {
        let same = coded.chars().next().and_then(|digit| digit.to_digit(36)).ok_or("no length")? as usize;
        let before = values.last().map_or("", String::as_str);
        if before.chars().count() < same {
            return Err(format!("{coded}: the one before is shorter"));
        }
        values.push(before.chars().take(same).chain(coded.chars().skip(1)).collect());
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A name like those of real launchers: host, process and time.
    fn member(host: u32) -> Member {
        let name = format!("node{host:05}");
        let address = format!("10.12.{}.{}", host / 256, host % 256);
        let chance = u64::from(host).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Member {
            launcher: format!("{name}_{}_{chance:016x}", chance % 4_000_000),
            node_rank: Some(host),
            ranks: 8,
            replicas: format!("{address}:{}", 32_768 + chance % 28_000),
            listens: format!("{address}:{}", 32_768 + chance % 27_000),
            leads: host == 0,
            domain: format!("rack-{}", host / 16),
            moves: true,
            prepares: host.is_multiple_of(2),
            implicated: host % 3,
            host: name,
            address,
        }
    }

    #[test]
    fn a_hundred_thousand_ranks_fit_into_a_value_of_the_store() {
        let seats = seated((0..12_500).map(member).collect());
        let packed = Packed::from_seats(&seats).expect("many");
        assert_eq!(packed.seats().expect("they are read"), seats);
        let bytes = serde_json::to_vec(&packed).expect("written").len();
        assert!(bytes < 1 << 20, "{bytes}");
    }

    #[test]
    fn a_small_job_is_stored_unpacked() {
        assert_eq!(Packed::from_seats(&seated((0..511).map(member).collect())), None);
        let mut spaced: Vec<Member> = (0..512).map(member).collect();
        spaced[7].domain = "row 7".to_owned();
        assert_eq!(Packed::from_seats(&seated(spaced)), None, "that name does not fit");
    }

    #[test]
    fn what_is_no_list_of_seats_is_refused() {
        let packed = Packed::from_seats(&seated((0..600).map(member).collect())).expect("many");
        let fewer = Packed { ranks: "08 ".to_owned(), ..packed.clone() };
        assert!(fewer.seats().is_err());
        let broken = Packed { hosts: packed.hosts.replacen('0', "z", 1), ..packed };
        assert!(broken.seats().is_err());
    }

    proptest! {
        #[test]
        fn any_names_survive_packing(names in proptest::collection::vec("[=~a-zé0-9.:-]{0,40}", 1..20)) {
            let members = (0..600_usize).map(|at| {
                let name = |offset: usize| names[(at * 7 + offset) % names.len()].clone();
                Member {
                    launcher: name(0),
                    host: name(1),
                    address: name(2),
                    replicas: format!("{}{}", name(2), name(3)),
                    listens: name(4),
                    domain: name(5),
                    node_rank: at.is_multiple_of(3).then_some(at as u32),
                    ranks: at as u32 % 9,
                    leads: at.is_multiple_of(5),
                    moves: at.is_multiple_of(2),
                    prepares: at.is_multiple_of(7),
                    implicated: u32::from(names.len() > 9 && at.is_multiple_of(11)),
                }
            });
            let seats = seated(members.collect());
            prop_assert_eq!(Packed::from_seats(&seats).expect("many").seats(), Ok(seats));
        }
    }
}
