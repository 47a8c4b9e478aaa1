// Progressive enhancement: every page works without these scripts.
import { keepTimes } from "./times.js";
import { keepLive } from "./live.js";
import { askFirst } from "./asking.js";
import { listenToKeys } from "./keys.js";
import { chooseMany } from "./choosing.js";
import { switchTheme } from "./theme.js";
import { copyTexts } from "./copying.js";

keepTimes();
askFirst();
listenToKeys();
chooseMany();
switchTheme();
copyTexts();
keepLive();
