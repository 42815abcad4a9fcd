//! The ports of a device that cannot be opened, from sysfs.

use super::description::{GidDescription, PortDescription};
use std::fs;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

/// The ports of a device; attributes that cannot be read are missing.
pub(crate) fn ports(device: &str, count: u32) -> Vec<PortDescription> {
    let ports = Path::new("/sys/class/infiniband").join(device).join("ports");
    (1..=count).map(|number| port(number, &ports.join(number.to_string()))).collect()
}

fn port(number: u32, directory: &Path) -> PortDescription {
    let file = |name: &str| read(directory.join(name));
    PortDescription {
        port: number,
        state: file("state").map(|text| coded(&text)),
        physical_state: file("phys_state").map(|text| coded(&text)),
        link_layer: file("link_layer"),
        lid: file("lid").and_then(|text| hexadecimal(&text)),
        sm_lid: file("sm_lid").and_then(|text| hexadecimal(&text)),
        gbit_per_second: file("rate").and_then(|text| text.split(' ').next()?.parse().ok()),
        width_and_speed: file("rate")
            .and_then(|text| Some(text.split_once('(')?.1.strip_suffix(')')?.to_owned())),
        gids: gids(directory),
        ..PortDescription::default()
    }
}

fn gids(directory: &Path) -> Vec<GidDescription> {
    let Ok(entries) = fs::read_dir(directory.join("gids")) else { return Vec::new() };
    let mut gids: Vec<_> = entries
        .filter_map(|entry| {
            let index: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let gid: Ipv6Addr = read(directory.join(format!("gids/{index}")))?.parse().ok()?;
            let attrs = directory.join("gid_attrs");
            (!gid.is_unspecified()).then(|| GidDescription {
                index,
                gid: gid.to_string(),
                gid_type: read(attrs.join(format!("types/{index}"))),
                netdev: read(attrs.join(format!("ndevs/{index}"))),
            })
        })
        .collect();
    gids.sort_by_key(|gid| gid.index);
    gids
}

fn read(path: PathBuf) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// The words of `4: ACTIVE`, in lower case as elsewhere.
fn coded(text: &str) -> String {
    let words = text.split_once(": ").map_or(text, |(_, words)| words);
    let mut spaced = String::new();
    for (place, letter) in words.char_indices() {
        let starts_word =
            letter.is_uppercase() && words[..place].ends_with(|before: char| before.is_lowercase());
        if starts_word {
            spaced.push(' ');
        }
        spaced.extend(letter.to_lowercase());
    }
    spaced
}

fn hexadecimal(text: &str) -> Option<u16> {
    u16::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_read_as_those_of_a_context() {
        assert_eq!(coded("4: ACTIVE"), "active");
        assert_eq!(coded("5: LinkUp"), "link up");
        assert_eq!(coded("3: Disabled"), "disabled");
        assert_eq!(coded("odd"), "odd");
    }

    #[test]
    fn a_tree_of_files_becomes_ports() {
        let root = std::env::temp_dir().join(format!("uverbs-sysfs-{}", std::process::id()));
        for (file, text) in [
            ("state", "4: ACTIVE\n"),
            ("phys_state", "5: LinkUp\n"),
            ("link_layer", "Ethernet\n"),
            ("rate", "100 Gb/sec (4X EDR)\n"),
            ("lid", "0x1f\n"),
            ("gids/0", "fe80:0000:0000:0000:5054:00ff:fe12:3456\n"),
            ("gids/1", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
            ("gids/10", "0000:0000:0000:0000:0000:ffff:0a00:0001\n"),
            ("gid_attrs/types/10", "RoCE v2\n"),
            ("gid_attrs/ndevs/10", "eth0\n"),
        ] {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let port = port(1, &root);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(port.state.as_deref(), Some("active"));
        assert_eq!(port.physical_state.as_deref(), Some("link up"));
        assert_eq!((port.lid, port.sm_lid), (Some(0x1f), None));
        assert_eq!(port.gbit_per_second, Some(100.0));
        assert_eq!(port.width_and_speed.as_deref(), Some("4X EDR"));
        assert_eq!(port.gids.len(), 2);
        assert_eq!(port.gids[1].index, 10);
        assert_eq!(port.gids[1].gid, "::ffff:10.0.0.1");
        assert_eq!(port.gids[1].gid_type.as_deref(), Some("RoCE v2"));
        assert_eq!(port.gids[1].netdev.as_deref(), Some("eth0"));
    }

    #[test]
    fn unreadable_attributes_are_unknown() {
        let ports = ports("no such device", 2);
        assert_eq!(ports.len(), 2);
        assert_eq!(ports[1], PortDescription { port: 2, ..PortDescription::default() });
    }
}
