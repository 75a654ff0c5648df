package allocation

import (
	"fmt"
	"sort"
	"strings"
)

// Not every node can run every task, whatever room it has: it may lack what the task needs beside room. What is lacking the cluster says; here it only closes nodes,
// and is said where a task waits.

// mostNamed are the nodes that are named with one reason.
const mostNamed = 3

// closedTo are nodes that are closed, and those that are unfit. It is the caller's own.
func closedTo(closed map[string]bool, unfit map[string]string) map[string]bool {
	all := make(map[string]bool, len(closed)+len(unfit))
	for name := range closed {
		all[name] = true
	}
	for name := range unfit {
		all[name] = true
	}
	return all
}

// unfitFor are the nodes that cannot run a lost copy: by its own wish, if it has one.
func (planner *Planner) unfitFor(task string, copy int) map[string]string {
	if wish := planner.wish(task, copy); wish != nil {
		return wish.Unfit
	}
	return planner.unfit[task]
}

// saysUnfit says which nodes cannot run something, by reason, after what else is said; nothing if all can.
func saysUnfit(unfit map[string]string) string {
	nodes := map[string][]string{}
	for name, why := range unfit {
		nodes[why] = append(nodes[why], name)
	}
	var all []string
	for why, names := range nodes {
		sort.Strings(names)
		more := ""
		if len(names) > mostNamed {
			more = fmt.Sprintf(" and %d more", len(names)-mostNamed)
			names = names[:mostNamed]
		}
		all = append(all, fmt.Sprintf("; not on %s%s: %s", strings.Join(names, ", "), more, why))
	}
	sort.Strings(all)
	return strings.Join(all, "")
}
