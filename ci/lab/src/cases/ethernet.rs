//! Ethernet through the functions: two network namespaces that reach each other by ARP, IP and the
//! connection manager only.

use super::case::Case;

/// Puts the second function's interface into a namespace of its own, with its address. The guest gave the first
/// interface a permanent entry for the second one's address; this removes it, unless the link went down and so did.
const PART: &str = r#"
/usr/bin/ip netns add far &&
/usr/bin/ip link set eth1 netns far &&
/usr/bin/ip -n far link set lo up &&
/usr/bin/ip -n far link set eth1 up &&
/usr/bin/ip -n far address add 10.0.0.2/24 dev eth1 &&
/usr/bin/ip neighbour flush to 10.0.0.2 dev eth0 nud permanent || fail "cannot part the interfaces"
"#;

/// Fetches a file over TCP in both directions and compares it.
const TRANSFER: &str = r#"
directory=$(mktemp -d) && cd $directory || exit 1
head -c 4194304 /dev/urandom >sent
far="/usr/bin/ip netns exec far"
$far httpd -f -p 10.0.0.2:8000 -h $directory & there=$!
httpd -f -p 10.0.0.1:8000 -h $directory & here=$!
until_true "tcp 8000" || exit 1
# The other server listens at 10.0.0.2:8000, which only its namespace lists.
until_true "grep -qE '0200000A:1F40 [0-9A-F]+:0000 0A' /proc/$there/net/tcp" || exit 1
timeout 60 wget -q -O got http://10.0.0.2:8000/sent; cmp sent got || fail "from there"
timeout 60 $far wget -q -O back http://10.0.0.1:8000/sent; cmp sent back || fail "to there"
kill $there $here
"#;

/// The cases in their order: the first one moves an interface into another namespace for the
/// others, and nothing moves it back.
pub(crate) fn cases() -> Vec<Case> {
    let far = "/usr/bin/ip netns exec far";
    let managed = |name: &str, server: &str, client: &str| Case {
        root: true,
        ..Case::pair(name, "cm", &format!("{far} {server}"), client)
    };
    vec![
        Case::as_root(
            "ethernet::arp",
            format!(
                "{PART}\nping -c 3 -W 5 10.0.0.2 || fail \"no answer\"\n\
                 /usr/bin/ip neighbour show to 10.0.0.2 | grep -q lladdr || fail \"no neighbour\""
            ),
        ),
        Case::as_root("ethernet::tcp", TRANSFER),
        Case::as_root(
            "ethernet::large_frames",
            format!(
                "/usr/bin/ip link set eth0 mtu 4000 && /usr/bin/ip -n far link set eth1 mtu 4000 \
                 || fail \"the MTU cannot be changed\"\nping -c 2 -W 5 -s 3800 10.0.0.2 || fail \"no \
                 answer\"\n{TRANSFER}"
            ),
        ),
        // Where the device's checksum is wrong, the kernel computes its own and reports "hw csum failure".
        Case::as_root(
            "ethernet::sums",
            "! dmesg | grep -A3 \"hw csum failure\" || fail \"the device's sums are wrong\"",
        ),
        managed(
            "ethernet::rping",
            "rping -s -a 10.0.0.2 -C 20 -V",
            "rping -c -a 10.0.0.2 -C 20 -V",
        ),
        managed("ethernet::udaddy", "udaddy -b 10.0.0.2", "udaddy -s 10.0.0.2"),
    ]
}
